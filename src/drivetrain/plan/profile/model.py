"""ModelProfile: what a model's training step needs, part by part, at any size.

This module has only data types; `profiling.py` creates them. A profile is for one way of computing
(`Way`): precision, recomputation, and whether layers are sharded over tensor-parallel ranks.
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

# A model's shape: parts, kinds of blocks, and a shorter model with one block of each kind.
#
# Blocks of one kind cost the same, so a deep model is traced with few of them: the first, one of
# each kind from the middle, and the last.


@dataclass(frozen=True)
class Shape:
    """The structure of a model."""

    kept: tuple[int, ...]
    """Indices of the blocks that the shortened model keeps."""
    stands_for: tuple[int, ...]
    """Per block of the full model: the position in `kept` of the block that represents it."""
    front: tuple[str, ...]
    back: tuple[str, ...]
    """Modules before and after the blocks."""
    can_be_staged: bool
    """Whether a pipeline can split it into stages."""

    @property
    def num_blocks(self) -> int:
        """Number of blocks of the full model."""
        return len(self.stands_for)

    def positions(self) -> list[int]:
        """Return, per part of the full model, the index of the traced part that represents it."""
        return [0, *(1 + kept for kept in self.stands_for), 1 + len(self.kept)]


def shape_of(model: nn.Module) -> Shape:
    """Return the shape of a model on any device."""
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
    """Remove, in place, the blocks that are represented by others."""
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
    """Whether two modules share a weight: a pipeline could not put them on two ranks."""
    num_named = sum(1 for _ in model.named_parameters(remove_duplicate=False))
    return num_named != sum(1 for _ in model.parameters())


# Growth: a quantity as a function of micro-batch, sequence length and tensor-parallel ranks.
#
# The size of every tensor in forward or backward is a product of the batch size, the length (once,
# or twice in attention that stores its scores), and sizes of the model; a layer that is sharded
# over `tp` ranks has 1/tp of it. So a number of bytes or operations is exactly
#
#     c0 + c1·s + b·(x·s + y·s²),    each coefficient  u + v/tp
#
# and a few traces at small sizes determine it for any size. `s` is a multiple of the profile's
# length.

Array = npt.NDArray[np.float64]


class Size(NamedTuple):
    """The size at which a trace was taken."""

    batch: int
    length: float = 1.0
    tp: int = 1


@dataclass(frozen=True)
class Growth:
    """Coefficients (… × 4 × 2), for one number or for a series of numbers."""

    coefficients: Array

    def at(self, batch: float, length: float = 1.0, tp: int = 1) -> Array:
        basis = np.array([1.0, length, batch * length, batch * length * length])
        shares = np.array([1.0, 1.0 / tp])
        return np.asarray(np.einsum("...ij,i,j->...", self.coefficients, basis, shares))

    def one(self, batch: float, length: float = 1.0, tp: int = 1) -> float:
        """Return the value at a size, for a single number."""
        return float(self.at(batch, length, tp))


def fit(samples: Mapping[Size, Array]) -> Growth:
    """Fit through two batch sizes, at one or two lengths and one or two numbers of tp ranks.

    With one length, a quantity is assumed to grow in proportion to it; with one number of ranks,
    not to depend on it.
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
    """Weights are provided in the compute precision already, as fsdp does."""
    recompute: Recompute = "none"
    is_shared: bool = False
    """Layers are sharded over tp ranks."""
    sequence_parallel: bool = False
    spreads_experts: bool = False
    """Tokens are sent to experts on other ranks."""


@dataclass(frozen=True)
class PartSizes:
    """Sizes of one part that do not depend on the batch, as functions of tp (`Growth`)."""

    parameters: Growth
    trained: Growth
    """Bytes of the parameters that have gradients."""
    optimizer: Growth
    buffers: Growth
    num_parameters: Growth
    num_weights: Growth
    """Number of parameter tensors."""
    experts: Growth
    """Bytes of the parameters that ep would shard."""
    trained_experts: Growth


@dataclass(frozen=True)
class PartWork:
    """Memory and work of one direction through a part."""

    live: Growth
    """Bytes alive after each operation, relative to the start of the part's forward; a series."""
    gradients: Growth
    """Bytes of weights' gradients that the part has added at each of these points."""
    flops: Growth
    attention_flops: Growth
    moved_bytes: Growth
    curved_bytes: Growth
    """The part of `moved_bytes` by slow functions; see `trace.Span`."""
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
    """Bytes that forward saves for backward."""
    forward: PartWork
    backward: PartWork


@dataclass(frozen=True)
class ModelProfile:
    """A step of the full model, computed in one way."""

    way: Way
    shape: Shape
    parts: tuple[PartProfile, ...]
    """The traced parts; `shape.positions()` maps the full model's parts to them."""
    hand_over_bytes: Growth
    """Bytes of the hidden state between blocks."""
    batch_bytes: Growth
    optimizer_extra: Growth
    """Peak temporary bytes of the optimizer's step, going weight by weight."""
    optimizer_moved: float
    """Bytes it reads and writes, per byte of trained weights."""
    optimizer_operations: float
    """Operations it takes, per weight."""

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the full model."""
        counts = [part.sizes.num_parameters.one(1) for part in self.parts]
        return round(sum(counts[position] for position in self.shape.positions()))

    def total(self, what: str, tp: int = 1) -> float:
        """Return the bytes of `parameters`, `trained`, `optimizer` or `buffers` over all parts."""
        each = [getattr(part.sizes, what).one(1, 1.0, tp) for part in self.parts]
        return float(sum(each[position] for position in self.shape.positions()))

    def flops(self, batch: float, length: float = 1.0, tp: int = 1) -> float:
        """Return the operations of one micro-batch, forward and backward, with recomputation."""
        each = [
            sum(
                work.flops.one(batch, length, tp) + work.attention_flops.one(batch, length, tp)
                for work in (part.forward, part.backward)
            )
            for part in self.parts
        ]
        return float(sum(each[position] for position in self.shape.positions()))

    def saved_bytes(self, batch: float, length: float = 1.0, tp: int = 1) -> float:
        """Return the bytes saved for backward at the end of forward."""
        each = [part.saved.one(batch, length, tp) for part in self.parts]
        return float(sum(each[position] for position in self.shape.positions()))


def worst(series: Growth, batch: float, length: float, tp: int) -> float:
    """Return the largest value of a series at one size."""
    values = series.at(batch, length, tp)
    return float(np.max(values)) if values.size else 0.0


# A profile at one size: a few numbers per traced part, from which any rank's are summed.


@lru_cache(maxsize=4096)
def _numbers(key: _Key) -> tuple[PartNumbers, ...]:
    return tuple(_part(part, key.batch, key.length, key.tp) for part in key.profile.parts)


def part_numbers(
    profile: ModelProfile, batch: float, length: float = 1.0, tp: int = 1
) -> tuple[PartNumbers, ...]:
    """Return every traced part at one size."""
    return _numbers(_Key(profile, batch, length, tp))


class _Key:
    """Cache key that uses the profile's identity, because its arrays are not hashable."""

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
