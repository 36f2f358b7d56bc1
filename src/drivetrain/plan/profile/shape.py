"""A model's shape: parts, kinds of blocks, and a shorter model that has one block of each kind.

Blocks of one kind cost the same, so a deep model is traced with few of them: its first, one from
its middle, its last.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from drivetrain.core.errors import ConfigError
from drivetrain.parallel.blocks import repeated_blocks
from drivetrain.parallel.pipeline.anatomy import anatomy_of


@dataclass(frozen=True)
class Shape:
    """How a model is put together."""

    kept: tuple[int, ...]
    """Which blocks a shorter model has."""
    stands_for: tuple[int, ...]
    """Per block of the model: its position among `kept`."""
    front: tuple[str, ...]
    back: tuple[str, ...]
    """Modules that come before and after the blocks."""
    can_be_staged: bool
    """Whether a pipeline could cut it."""

    @property
    def num_blocks(self) -> int:
        """Of the whole model."""
        return len(self.stands_for)

    def positions(self) -> list[int]:
        """Per part of the whole model (front, blocks, back): the traced part that stands for it."""
        return [0, *(1 + kept for kept in self.stands_for), 1 + len(self.kept)]


def shape_of(model: nn.Module) -> Shape:
    """Look at a model, on whatever device."""
    blocks = repeated_blocks(model)
    kinds = [_kind(block) for block in blocks]
    last = len(blocks) - 1
    kept: list[int] = []
    for index, kind in enumerate(kinds):
        is_end = index in (0, last)
        if is_end or kind not in [kinds[k] for k in kept if k not in (0, last)]:
            kept.append(index)
    inner = {kinds[k]: position for position, k in enumerate(kept) if k not in (0, last)}
    stands_for = [
        kept.index(index) if index in (0, last) else inner[kind] for index, kind in enumerate(kinds)
    ]
    front, back, can_be_staged = _ends(model)
    return Shape(tuple(kept), tuple(stands_for), front, back, can_be_staged)


def shorten(model: nn.Module, shape: Shape) -> None:
    """Leave out, in place, the blocks that others stand for."""
    blocks = repeated_blocks(model)
    kept = {id(blocks[index]) for index in shape.kept}
    gone = {id(block) for block in blocks} - kept
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            for index in reversed(range(len(module))):
                if id(module[index]) in gone:
                    del module[index]


def _kind(block: nn.Module) -> tuple[object, ...]:
    weights = tuple((n, tuple(p.shape), p.requires_grad) for n, p in block.named_parameters())
    return (type(block).__name__, *weights)


def _ends(model: nn.Module) -> tuple[tuple[str, ...], tuple[str, ...], bool]:
    try:
        anatomy = anatomy_of(model)
    except ConfigError:
        return (), (), False
    return anatomy.front, anatomy.back, not _is_tied(model)


def _is_tied(model: nn.Module) -> bool:
    """Whether two modules have one weight: a pipeline could not put them on two ranks."""
    num_named = sum(1 for _ in model.named_parameters(remove_duplicate=False))
    return num_named != sum(1 for _ in model.parameters())
