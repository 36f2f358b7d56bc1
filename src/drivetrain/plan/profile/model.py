"""ModelProfile: what a training step of a model takes, part by part, at any size.

Values only; `profiling.py` makes them. A profile is for one way of computing (`Way`): precision,
recomputation, and whether layers are shared by tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import nn

from drivetrain.core.errors import ConfigError
from drivetrain.parallel.blocks import repeated_blocks
from drivetrain.parallel.pipeline.anatomy import anatomy_of
from drivetrain.strategies.cost import PartNumbers, WorkNumbers

# A model's shape: parts, kinds of blocks, and a shorter model that has one block of each kind.
#
# Blocks of one kind cost the same, so a deep model is traced with few of them: its first, one from
# its middle, its last.


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


# Growth: a quantity as a function of micro-batch, sequence length and tensor-parallel ranks.
#
# Every tensor of a forward or backward pass is a product of a batch size, a length (once, or twice
# in attention that writes its scores down), and sizes of the model; a layer that `tp` ranks share
# has 1/tp of it. So a number of bytes, or of operations, is exactly
#
#     c0 + c1·s + b·(x·s + y·s²),    each coefficient  u + v/tp
#
# and a few traces at small sizes give it at any. `s` counts in lengths of the profile.

Array = npt.NDArray[np.float64]


class Size(NamedTuple):
    """Where a trace was taken."""

    batch: int
    length: float = 1.0
    tp: int = 1


@dataclass(frozen=True)
class Growth:
    """Coefficients (… × 4 × 2), for one number or for a whole series of them."""

    coefficients: Array

    def at(self, batch: float, length: float = 1.0, tp: int = 1) -> Array:
        basis = np.array([1.0, length, batch * length, batch * length * length])
        shares = np.array([1.0, 1.0 / tp])
        return np.asarray(np.einsum("...ij,i,j->...", self.coefficients, basis, shares))

    def one(self, batch: float, length: float = 1.0, tp: int = 1) -> float:
        """The value there, of a single number."""
        return float(self.at(batch, length, tp))


def fit(samples: Mapping[Size, Array]) -> Growth:
    """Through two batches, at one length or two, with one or two numbers of tp ranks.

    With one length a quantity is taken to grow in proportion to it; with one number of ranks, not
    to depend on it.
    """
    by_tp: dict[int, Array] = {}
    for tp in {size.tp for size in samples}:
        by_tp[tp] = _over_batch_and_length({s: v for s, v in samples.items() if s.tp == tp})
    if len(by_tp) == 1:
        only = next(iter(by_tp.values()))
        return Growth(np.stack([only, np.zeros_like(only)], axis=-1))
    (low, at_low), (high, at_high) = sorted(by_tp.items())
    shared = (at_low - at_high) / (1 / low - 1 / high)
    return Growth(np.stack([at_low - shared / low, shared], axis=-1))


def _over_batch_and_length(samples: Mapping[Size, Array]) -> Array:
    lengths = sorted({size.length for size in samples}, reverse=True)
    rows = {length: _over_batch(samples, length) for length in lengths}
    constant, slope = rows[lengths[0]]
    zero = np.zeros_like(constant)
    if len(lengths) == 1:
        return np.stack([constant, zero, slope, zero], axis=-1)
    short = lengths[1]
    constant_short, slope_short = rows[short]
    # slope(s) = x·s + y·s², constant(s) = c0 + c1·s, known at s = 1 and s = short
    y = (slope_short / short - slope) / (short - 1.0)
    per_length = (constant - constant_short) / (1.0 - short)
    return np.stack([constant - per_length, per_length, slope - y, y], axis=-1)


def _over_batch(samples: Mapping[Size, Array], length: float) -> tuple[Array, Array]:
    at = {size.batch: value for size, value in samples.items() if size.length == length}
    (low, at_low), (high, at_high) = sorted(at.items())
    slope = (at_high - at_low) / (high - low)
    return at_low - low * slope, slope


Recompute = Literal["none", "selective", "full"]
PrecisionName = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True)
class Way:
    """How a step is computed."""

    precision: PrecisionName = "fp32"
    weights_cast: bool = False
    """Weights come in the compute precision already, as fsdp hands them out."""
    recompute: Recompute = "none"
    is_shared: bool = False
    """Layers are shared by tp ranks."""
    sequence_parallel: bool = False
    spreads_experts: bool = False
    """Tokens travel to experts on other ranks."""


@dataclass(frozen=True)
class PartSizes:
    """Bytes of one part that do not depend on the batch; one number per tp through `Growth`."""

    parameters: Growth
    trained: Growth
    """Of the parameters, those with gradients."""
    optimizer: Growth
    buffers: Growth
    num_parameters: Growth
    num_weights: Growth
    """How many tensors they are in."""
    experts: Growth
    """Of the parameters, those that ep would spread."""
    trained_experts: Growth


@dataclass(frozen=True)
class PartWork:
    """What one direction through a part does."""

    live: Growth
    """Bytes alive after each operation, from the beginning of the part's forward; a series."""
    gradients: Growth
    """Bytes of weights' gradients that the part has added at each of these points."""
    flops: Growth
    attention_flops: Growth
    moved_bytes: Growth
    curved_bytes: Growth
    """Of `moved_bytes`; see `trace.Span`."""
    num_operations: float
    num_products: float
    exchanged_bytes: dict[tuple[str, str], Growth]
    """By axis and kind of collective."""
    num_exchanges: dict[tuple[str, str], int]


@dataclass(frozen=True)
class PartProfile:
    """One part: the front, a block, or the back with the loss."""

    name: str
    sizes: PartSizes
    saved: Growth
    """Bytes that stay from forward for backward."""
    forward: PartWork
    backward: PartWork


@dataclass(frozen=True)
class ModelProfile:
    """A step of the whole model, computed one way."""

    way: Way
    shape: Shape
    parts: tuple[PartProfile, ...]
    """As traced; `shape.positions()` says which stands where."""
    hand_over_bytes: Growth
    """The hidden state between blocks."""
    batch_bytes: Growth
    optimizer_extra: Growth
    """Bytes the optimizer's step has on top at its worst moment, going weight by weight."""
    optimizer_moved: float
    """Bytes it reads and writes, per byte of trained weights."""
    optimizer_operations: float
    """Operations it takes, per weight."""

    @property
    def num_parameters(self) -> int:
        """Of the whole model."""
        counts = [part.sizes.num_parameters.one(1) for part in self.parts]
        return round(sum(counts[position] for position in self.shape.positions()))

    def total(self, what: str, tp: int = 1) -> float:
        """Bytes of `parameters`, `trained`, `optimizer` or `buffers` over all parts."""
        each = [getattr(part.sizes, what).one(1, 1.0, tp) for part in self.parts]
        return float(sum(each[position] for position in self.shape.positions()))

    def flops(self, batch: float, length: float = 1.0, tp: int = 1) -> float:
        """Of one micro-batch, forward and backward, recomputation included."""
        each = [
            sum(
                work.flops.one(batch, length, tp) + work.attention_flops.one(batch, length, tp)
                for work in (part.forward, part.backward)
            )
            for part in self.parts
        ]
        return float(sum(each[position] for position in self.shape.positions()))

    def saved_bytes(self, batch: float, length: float = 1.0, tp: int = 1) -> float:
        """All that waits for backward when forward is through."""
        each = [part.saved.one(batch, length, tp) for part in self.parts]
        return float(sum(each[position] for position in self.shape.positions()))


def worst(series: Growth, batch: float, length: float, tp: int) -> float:
    """The largest of a series of values."""
    values = series.at(batch, length, tp)
    return float(np.max(values)) if values.size else 0.0


# A profile at one size: each traced part as a few numbers, from which any rank is added up.


@lru_cache(maxsize=4096)
def _numbers(key: _Key) -> tuple[PartNumbers, ...]:
    return tuple(_part(part, key.batch, key.length, key.tp) for part in key.profile.parts)


def part_numbers(
    profile: ModelProfile, batch: float, length: float = 1.0, tp: int = 1
) -> tuple[PartNumbers, ...]:
    """Every traced part at one size."""
    return _numbers(_Key(profile, batch, length, tp))


class _Key:
    """Hashes by the profile's identity: its arrays have none."""

    def __init__(self, profile: ModelProfile, batch: float, length: float, tp: int) -> None:
        self.profile, self.batch, self.length, self.tp = profile, batch, length, tp
        self._values = (id(profile), batch, length, tp)

    def __hash__(self) -> int:
        return hash(self._values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self._values == other._values


def _part(part: PartProfile, batch: float, length: float, tp: int) -> PartNumbers:
    sizes = part.sizes
    return PartNumbers(
        sizes.parameters.one(1, 1.0, tp),
        sizes.trained.one(1, 1.0, tp),
        sizes.optimizer.one(1, 1.0, tp),
        sizes.buffers.one(1, 1.0, tp),
        sizes.num_weights.one(1, 1.0, tp),
        part.saved.one(batch, length, tp),
        _work(part.forward, batch, length, tp),
        _work(part.backward, batch, length, tp),
        sizes.experts.one(1, 1.0, tp),
        sizes.trained_experts.one(1, 1.0, tp),
    )


def _work(work: PartWork, batch: float, length: float, tp: int) -> WorkNumbers:
    live = work.live.at(batch, length, tp)
    gradients = work.gradients.at(batch, length, tp)
    both = live + gradients if live.shape == gradients.shape else live + np.max(gradients)
    has_any = live.size > 0
    return WorkNumbers(
        float(live.max()) if has_any else 0.0,
        float(both.max()) if has_any else 0.0,
        float(gradients[-1]) if gradients.size else 0.0,
        float(live[-1]) if has_any else 0.0,
        work.flops.one(batch, length, tp),
        work.attention_flops.one(batch, length, tp),
        work.moved_bytes.one(batch, length, tp),
        work.curved_bytes.one(batch, length, tp),
        work.num_operations,
        work.num_products,
        tuple(
            (*key, growth.one(batch, length, tp), work.num_exchanges[key])
            for key, growth in work.exchanged_bytes.items()
        ),
    )
