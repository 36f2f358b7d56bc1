"""The repeated blocks of a model: what FSDP shards and what recomputation wraps, one by one."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from drivetrain.core.errors import ConfigError, Problem


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The children of the model's outermost ModuleLists that have weights, in order."""
    blocks: list[nn.Module] = []

    def visit(module: nn.Module) -> None:
        for child in module.children():
            if isinstance(child, nn.ModuleList):
                blocks.extend(
                    block for block in child if next(block.parameters(), None) is not None
                )
            else:
                visit(child)

    visit(model)
    return blocks


def blocks_named(model: nn.Module, class_names: Sequence[str]) -> list[nn.Module]:
    """Every module of the named classes; a name that matches nothing is an error."""
    found = [m for m in model.modules() if type(m).__name__ in class_names and m is not model]
    missing = set(class_names) - {type(m).__name__ for m in found}
    if missing:
        known = sorted({type(m).__name__ for m in model.modules()})
        raise ConfigError(
            [
                Problem(
                    "parallel.fsdp.shard_modules",
                    "the model has no module of this class",
                    f"it has {', '.join(known)}",
                    name,
                )
                for name in sorted(missing)
            ]
        )
    return found
