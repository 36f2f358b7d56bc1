"""ModelProfile: what a training step of a model takes, part by part, at any size.

Values only; `profiling.py` makes them. A profile is for one way of computing (`Way`): precision,
recomputation, and whether layers are shared by tensor-parallel ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from drivetrain.plan.profile.growth import Growth
from drivetrain.plan.profile.shape import Shape

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
    exchanged_bytes: dict[str, Growth]
    """Along tp, by kind of collective."""
    num_exchanges: dict[str, int]


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
