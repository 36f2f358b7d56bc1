"""A model as a pipeline sees it: what comes before its repeated blocks, they, what follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from drivetrain.core.errors import ConfigError, Problem
from drivetrain.parallel.blocks import repeated_blocks


@dataclass(frozen=True)
class Anatomy:
    """Names of modules, in the order they are registered; only those that have weights."""

    front: tuple[str, ...]
    blocks: tuple[str, ...]
    back: tuple[str, ...]


def anatomy_of(model: nn.Module) -> Anatomy:
    """Take a model apart; ConfigError when it is not built that way."""
    blocks = repeated_blocks(model)
    names = {module: name for name, module in model.named_modules()}
    if not blocks:
        raise _refused("the model has no repeated blocks to share", "keep them in a ModuleList")
    block_names = tuple(names[block] for block in blocks)
    front: list[str] = []
    back: list[str] = []
    seen_blocks = 0

    def visit(module: nn.Module, prefix: str) -> None:
        nonlocal seen_blocks
        for name, _ in module.named_parameters(recurse=False):
            raise _refused(
                f"the weight {prefix}{name} belongs to no module that one rank could have",
                "put it into a module of its own, before or after the blocks",
            )
        for name, child in module.named_children():
            path = f"{prefix}{name}"
            if path in block_names:
                seen_blocks += 1
            elif any(block.startswith(f"{path}.") for block in block_names):
                visit(child, f"{path}.")
            elif next(child.parameters(), None) is not None:
                if 0 < seen_blocks < len(blocks):
                    raise _refused(f"{path} lies between the blocks", "make it part of a block")
                (back if seen_blocks else front).append(path)

    visit(model, "")
    return Anatomy(tuple(front), block_names, tuple(back))


def tied_weights(model: nn.Module, parts: Sequence[Sequence[str]]) -> list[Problem]:
    """Weights that two stages would share, each training its own copy."""
    owner: dict[int, tuple[int, str]] = {}
    problems = []
    for stage, modules in enumerate(parts):
        for module in modules:
            for name, weight in model.get_submodule(module).named_parameters():
                first, other = owner.setdefault(id(weight), (stage, f"{module}.{name}"))
                if first != stage:
                    problems.append(
                        Problem(
                            "parallel.pp",
                            f"{module}.{name} is the same weight as {other}, on another rank",
                            "untie them (Hugging Face: tie_word_embeddings=False)",
                            has_value=False,
                        )
                    )
    return problems


def _refused(rule: str, remedy: str) -> ConfigError:
    return ConfigError([Problem("parallel.pp", rule, remedy, has_value=False)])
