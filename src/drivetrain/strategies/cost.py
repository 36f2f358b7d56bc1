"""CostModel: what a strategy takes of a model on a layout, in memory and in exchanges. No torch.

One model for two questions: the planner asks it about every candidate, part by part of a traced
model; a run's start-up check asks it about the model that is there (`Strategy.cost`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Protocol

from drivetrain.cluster.exchange import passes
from drivetrain.core.plugins import load
from drivetrain.core.section import Section
from drivetrain.core.traits import traits_of
from drivetrain.parallel.layout import Layout

BUCKET_BYTES = 25e6
"""Gradients that are reduced beside backward are sent in pieces of this size."""


@dataclass(frozen=True)
class WorkNumbers:
    """One direction through a part."""

    peak: float = 0.0
    """Most bytes alive, weights' gradients left out, from the beginning of the part's forward."""
    peak_with_gradients: float = 0.0
    """The same with the gradients that the part adds."""
    gradients: float = 0.0
    """Bytes of gradients that the part adds."""
    end: float = 0.0
    """Bytes alive at its end, gradients left out."""
    flops: float = 0.0
    attention_flops: float = 0.0
    moved_bytes: float = 0.0
    curved_bytes: float = 0.0
    num_operations: float = 0.0
    num_products: float = 0.0
    exchanges: tuple[tuple[str, str, float, int], ...] = ()
    """(axis, kind, bytes in all, number of calls): within layers that tp or ep share."""


@dataclass(frozen=True)
class PartNumbers:
    """One part of a model: what is before its blocks, a block, or what is after them. Bytes."""

    parameters: float
    trained: float
    optimizer: float
    buffers: float = 0.0
    num_weights: float = 0.0
    saved: float = 0.0
    forward: WorkNumbers = WorkNumbers()
    backward: WorkNumbers = WorkNumbers()
    experts: float = 0.0
    """Of `parameters`: what ep spreads."""
    trained_experts: float = 0.0
    """Of `trained`."""


@dataclass(frozen=True)
class Use:
    """How a strategy is used: what its cost depends on beside the model."""

    layout: Layout
    options: Any
    """Its own section of the config."""
    accumulation: int = 1
    """Micro-batches per rank and step."""
    precision: str = "fp32"
    offload: str = "none"

    @property
    def num_shards(self) -> int:
        """Ranks that shards are over."""
        return self.layout.dp_shard * self.layout.cp

    def whole(self, part: PartNumbers) -> float:
        """Bytes of a part's weights when its shards are put together: ep leaves others' experts."""
        return part.parameters - part.experts * (1 - 1 / self.layout.ep)

    def whole_trained(self, part: PartNumbers) -> float:
        """The same of its gradients."""
        return part.trained - part.trained_experts * (1 - 1 / self.layout.ep)

    @property
    def is_divided(self) -> bool:
        """Whether the model itself is cut: tp, pp or cp."""
        return self.layout.tp * self.layout.pp * self.layout.cp > 1


@dataclass(frozen=True)
class Moment:
    """One point of a step, beside what is always there. Bytes."""

    name: str
    activations: float
    gradients: float
    gathered: float = 0.0


@dataclass(frozen=True)
class Held:
    """What is there all the time. Bytes."""

    parameters: float
    optimizer: float
    buffers: float


class Walk(Protocol):
    """A rank's memory, moment by moment through a step."""

    def held(self) -> Held:
        """All the time."""
        ...

    def forward(self) -> list[Moment]:
        """Part by part."""
        ...

    def backward(self) -> list[Moment]:
        """Part by part, from the last."""
        ...

    def optimizer(self, extra: float) -> Moment:
        """While weights move; `extra`: what the optimizer has in hand."""
        ...


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank, at the moment when they are most."""

    parameters: float
    gradients: float
    optimizer: float
    buffers: float
    activations: float
    """Saved for backward, and what an operation has in hand."""
    gathered: float
    """Weights put together, gradients on their way, messages between stages."""
    batch: float
    moment: str
    """When that is: forward, backward or optimizer."""

    @property
    def total(self) -> float:
        """All of it."""
        return sum(self.components().values())

    def components(self) -> dict[str, float]:
        """By name."""
        return {
            "parameters": self.parameters,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "buffers": self.buffers,
            "activations": self.activations,
            "gathered": self.gathered,
            "batch": self.batch,
        }


@dataclass(frozen=True)
class Exchange:
    """What a rank hands to collectives in a step, and what runs beside it."""

    kind: str
    axes: tuple[str, ...]
    num_bytes: float
    """Of the whole: what a gather gives, what a reduction is given."""
    calls: float = 1.0
    """Collectives that these bytes are in."""
    times: float = 1.0
    """A step does all this so many times."""
    beside: Literal["forward", "backward", "nothing"] = "nothing"
    turns: float = 1.0
    """Micro-batches of computing that it runs beside."""
    pieces: float = math.inf
    """One of so many has nothing beside it: the first gather, the last reduction."""
    units: float = 0.0
    """Sharded units that the host prepares for it."""

    def sent_bytes(self, layout: Layout) -> float:
        """Per rank and step, in a ring."""
        ranks: int = math.prod(getattr(layout, axis) for axis in self.axes)
        return self.times * passes(self.kind, ranks) * self.num_bytes


@dataclass(frozen=True)
class Variant:
    """One way to use a strategy on the ranks that are left for data parallelism."""

    dp_replicate: int
    dp_shard: int
    options: Section


class CostModel(Protocol):
    """Of one strategy. What has a default here suits full copies of the model."""

    def variants(
        self, dp: int, cp: int, *, is_divided: bool, shard_sizes: Sequence[int]
    ) -> Iterator[Variant]:
        """What could be done with `dp` ranks; `shard_sizes` are those worth looking at."""
        ...

    def walk(
        self, parts: Sequence[PartNumbers], is_root: Sequence[bool], hidden: float, use: Use
    ) -> Walk:
        """Memory. `is_root`: in no block; `hidden`: bytes of a hidden state between blocks."""
        return CopiedWalk(parts, keeps_gradients=use.accumulation > 1 or use.layout.dp > 1)

    def exchanges(
        self, parts: Sequence[PartNumbers], is_root: Sequence[bool], use: Use
    ) -> list[Exchange]:
        """What is sent, and beside what."""
        ...

    def label(self, use: Use) -> str:
        """Its name in tables."""
        ...

    def remark(self, use: Use) -> str:
        """What is unusual about this use of it, in a word or two."""
        return ""

    def settings(self, use: Use) -> dict[str, str | int]:
        """As keys of a run's config, beside the common ones."""
        return {}

    def complexity(self, use: Use) -> float:
        """Of two that are equally fast the simpler is taken: 0 is the simplest."""
        return 1.0

    def leaner(self, use: Use) -> Section | None:
        """Options that take less memory and more time, if there are any."""
        return None

    def casts_weights(self, use: Use) -> bool:
        """Whether weights come in the compute precision already."""
        return False

    def num_shards(self, use: Use) -> int:
        """Ranks that the optimizer's state is divided over."""
        return 1

    def step_shards(self, use: Use) -> int:
        """Ranks that what the optimizer has in hand is divided over."""
        return self.num_shards(use)

    def can_offload(self, use: Use) -> bool:
        """Whether state can wait in the host's memory."""
        return False

    def on_device(self, memory: Memory, use: Use) -> Memory:
        """Without what waits in the host's memory."""
        return memory

    def least_state(self, weights: float, trained: float, state: float, use: Use) -> float:
        """Weights, gradients and optimizer state in the most even split: no less is possible."""
        return weights + trained + state


class CopiedWalk(Walk):
    """A full copy of the parts on each rank."""

    def __init__(
        self, parts: Sequence[PartNumbers], *, keeps_gradients: bool, copies: int = 1
    ) -> None:
        self._parts = parts
        self._keeps = keeps_gradients
        self._gradients = copies * sum(part.trained for part in parts)

    def held(self) -> Held:
        """Everything in full."""
        return Held(
            sum(part.parameters for part in self._parts),
            sum(part.optimizer for part in self._parts),
            sum(part.buffers for part in self._parts),
        )

    def forward(self) -> list[Moment]:
        """Each part on top of what earlier ones have saved."""
        moments, saved = [], 0.0
        there = self._gradients if self._keeps else 0.0
        for part in self._parts:
            moments.append(Moment("forward", saved + part.forward.peak, there))
            saved += part.saved
        return moments

    def backward(self) -> list[Moment]:
        """Back, with gradients coming in, or into where they already are."""
        moments = []
        saved = sum(part.saved for part in self._parts)
        made = 0.0
        for part in reversed(self._parts):
            saved -= part.saved
            work = part.backward
            if self._keeps:
                moments.append(Moment("backward", saved + work.peak, self._gradients))
            else:
                added = work.peak_with_gradients - work.peak
                moments.append(Moment("backward", saved + work.peak, made + added))
                made += work.gradients
        return moments

    def optimizer(self, extra: float) -> Moment:
        """All gradients, and what the optimizer has in hand."""
        return Moment("optimizer", extra, self._gradients)


def copies_with_buckets(parts: Sequence[PartNumbers], use: Use) -> CopiedWalk:
    """Full copies whose gradients live in buckets from the first step on.

    Those of micro-batches that are not sent lie beside the buckets, not in them.
    """
    accumulates, is_copied = use.accumulation > 1, use.layout.dp > 1
    copies = 2 if accumulates and is_copied else 1
    return CopiedWalk(parts, keeps_gradients=accumulates or is_copied, copies=copies)


def reduced_copies(trained: float, use: Use, times: float = 1.0) -> list[Exchange]:
    """Gradients of copies of the model, added up in buckets beside the last backward."""
    if use.layout.dp_replicate == 1:
        return []
    calls = max(1.0, trained / BUCKET_BYTES)
    return [
        Exchange("all_reduce", ("dp_replicate",), trained, calls, times=times, beside="backward")
    ]


@cache
def cost_model(strategy: str) -> CostModel:
    """Of a strategy, by its name."""
    found: CostModel = load(traits_of(strategy).cost)
    return found
