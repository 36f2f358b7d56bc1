"""The repeated blocks of a model: what is sharded and what recomputation wraps, one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from drivetrain.core.errors import ConfigError, Problem


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The children of the model's outermost ModuleLists that have weights, in order."""
    blocks: list[nn.Module] = []

    def visit(module: nn.Module) -> None:
        for child in module.children():
            is_block = isinstance(module, nn.ModuleList) and not isinstance(child, nn.ModuleList)
            if not is_block:
                visit(child)
            elif next(child.parameters(), None) is not None:
                blocks.append(child)

    visit(model)
    return blocks


def with_hidden(
    args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[Any], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A block's arguments with the hidden state changed: the first, or by Hugging Face's name."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}


def blocks_named(model: nn.Module, class_names: Sequence[str], key: str) -> list[nn.Module]:
    """Every module of the classes that the config names under `key`; all must be there."""
    # innermost first: what is sharded already is left out of what surrounds it
    modules = reversed(list(model.modules()))
    found = [m for m in modules if type(m).__name__ in class_names and m is not model]
    missing = set(class_names) - {type(m).__name__ for m in found}
    if missing:
        known = sorted({type(m).__name__ for m in model.modules()})
        raise ConfigError(
            [
                Problem(
                    key,
                    "the model has no module of this class",
                    f"it has {', '.join(known)}",
                    name,
                )
                for name in sorted(missing)
            ]
        )
    return found
