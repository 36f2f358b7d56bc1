"""CostModel: memory and communication of a strategy for a model on a layout. Imports no torch.

It serves two callers: the planner evaluates every candidate, part by part of a traced model; a
run's start-up check evaluates the actual model (`Strategy.cost`).
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
"""Gradients that are reduced during backward are sent in buckets of this size."""


@dataclass(frozen=True)
class WorkNumbers:
    """Memory and work of one direction (forward or backward) through a part."""

    peak: float = 0.0
    """Peak bytes alive without gradients of weights, relative to the start of the part's forward.
    """
    peak_with_gradients: float = 0.0
    """The same, including the gradients that the part adds."""
    gradients: float = 0.0
    """Bytes of gradients that the part adds."""
    end: float = 0.0
    """Bytes alive at its end, without gradients."""
    flops: float = 0.0
    attention_flops: float = 0.0
    moved_bytes: float = 0.0
    curved_bytes: float = 0.0
    num_operations: float = 0.0
    num_products: float = 0.0
    exchanges: tuple[tuple[str, str, float, int], ...] = ()
    """(axis, kind, total bytes, number of calls): inside layers that are sharded by tp or ep."""


@dataclass(frozen=True)
class PartNumbers:
    """Sizes in bytes of one part of a model: before its blocks, one block, or after them."""

    parameters: float
    trained: float
    optimizer: float
    buffers: float = 0.0
    num_weights: float = 0.0
    saved: float = 0.0
    forward: WorkNumbers = WorkNumbers()
    backward: WorkNumbers = WorkNumbers()
    experts: float = 0.0
    """The part of `parameters` that ep shards."""
    trained_experts: float = 0.0
    """The part of `trained` that ep shards."""


@dataclass(frozen=True)
class Use:
    """How a strategy is used: everything its cost depends on except the model."""

    layout: Layout
    options: Any
    """The strategy's own section of the config."""
    accumulation: int = 1
    """Micro-batches per rank and step."""
    precision: str = "fp32"
    offload: str = "none"

    @property
    def num_shards(self) -> int:
        """Number of ranks that one copy is sharded over."""
        return self.layout.dp_shard * self.layout.cp

    def whole(self, part: PartNumbers) -> float:
        """Bytes of a part's gathered weights; with ep, experts of other ranks are not included."""
        return part.parameters - part.experts * (1 - 1 / self.layout.ep)

    def whole_trained(self, part: PartNumbers) -> float:
        """Bytes of a part's unsharded gradients, by the same rule as `whole`."""
        return part.trained - part.trained_experts * (1 - 1 / self.layout.ep)

    @property
    def is_divided(self) -> bool:
        """Whether tp, pp or cp shards the model or its sequences."""
        return self.layout.tp * self.layout.pp * self.layout.cp > 1


@dataclass(frozen=True)
class Moment:
    """Bytes at one point of a step, in addition to what is always held (`Held`)."""

    name: str
    activations: float
    gradients: float
    gathered: float = 0.0


@dataclass(frozen=True)
class Held:
    """Bytes held throughout a step."""

    parameters: float
    optimizer: float
    buffers: float


class Walk(Protocol):
    """A rank's memory at each moment of a step."""

    def held(self) -> Held:
        """Return what is held throughout the step."""
        ...

    def forward(self) -> list[Moment]:
        """Return the moments of forward, part by part."""
        ...

    def backward(self) -> list[Moment]:
        """Return the moments of backward, part by part from the last."""
        ...

    def optimizer(self, extra: float) -> Moment:
        """Return the moment of the optimizer step; `extra` is the optimizer's temporary memory."""
        ...


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank at the moment of its peak memory."""

    parameters: float
    gradients: float
    optimizer: float
    buffers: float
    activations: float
    """Saved for backward, and temporary memory of operations."""
    gathered: float
    """Gathered weights, gradients that are being sent, messages between stages."""
    batch: float
    moment: str
    """When the peak is: forward, backward or optimizer."""

    @property
    def total(self) -> float:
        return sum(self.components().values())

    def components(self) -> dict[str, float]:
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
    """What a rank passes to collectives in a step, and the computation that overlaps it."""

    kind: str
    axes: tuple[str, ...]
    num_bytes: float
    """Bytes of the whole tensor: the output of a gather, the input of a reduction."""
    calls: float = 1.0
    """Number of collectives that these bytes are sent in."""
    times: float = 1.0
    """How many times a step does all this."""
    beside: Literal["forward", "backward", "nothing"] = "nothing"
    """The computation that overlaps it."""
    turns: float = 1.0
    """Micro-batches of computation that it overlaps with."""
    pieces: float = math.inf
    """One piece out of this many does not overlap: the first gather, the last reduction."""
    units: float = 0.0
    """Sharded units that the host prepares for it."""

    def sent_bytes(self, layout: Layout) -> float:
        """Return the bytes sent per rank and step with ring collectives."""
        ranks: int = math.prod(getattr(layout, axis) for axis in self.axes)
        return self.times * passes(self.kind, ranks) * self.num_bytes


@dataclass(frozen=True)
class Variant:
    """One way to use a strategy on the ranks available for data parallelism."""

    dp_replicate: int
    dp_shard: int
    options: Section


class CostModel(Protocol):
    """The cost of one strategy. The defaults fit strategies that keep full copies of the model."""

    def variants(
        self, dp: int, cp: int, *, is_divided: bool, shard_sizes: Sequence[int]
    ) -> Iterator[Variant]:
        """Yield the possible uses of `dp` ranks; `shard_sizes` are the sizes worth trying."""
        ...

    def walk(
        self, parts: Sequence[PartNumbers], is_root: Sequence[bool], hidden: float, use: Use
    ) -> Walk:
        """Return the memory of a step.

        `is_root` marks parts that are in no block; `hidden` is the number of bytes of a hidden
        state between blocks.
        """
        return CopiedWalk(parts, keeps_gradients=use.accumulation > 1 or use.layout.dp > 1)

    def exchanges(
        self, parts: Sequence[PartNumbers], is_root: Sequence[bool], use: Use
    ) -> list[Exchange]:
        """Return what is sent, and which computation overlaps it."""
        ...

    def label(self, use: Use) -> str:
        """Return the name shown in tables."""
        ...

    def remark(self, use: Use) -> str:
        """Return what is unusual about this use, in a word or two."""
        return ""

    def settings(self, use: Use) -> dict[str, str | int]:
        """Return the strategy's own config keys and values for this use."""
        return {}

    def complexity(self, use: Use) -> float:
        """Return how complex this use is, from 0; of equally fast plans the simpler one is used."""
        return 1.0

    def leaner(self, use: Use) -> Section | None:
        """Return options that need less memory and more time, or None."""
        return None

    def casts_weights(self, use: Use) -> bool:
        """Whether weights are provided in the compute precision already."""
        return False

    def num_shards(self, use: Use) -> int:
        """Return the number of ranks that the optimizer state is sharded over."""
        return 1

    def step_shards(self, use: Use) -> int:
        """Return the number of ranks that the optimizer's temporary memory is sharded over."""
        return self.num_shards(use)

    def can_offload(self, use: Use) -> bool:
        """Whether state can be offloaded to host memory."""
        return False

    def on_device(self, memory: Memory, use: Use) -> Memory:
        """Return the memory without what is offloaded to the host."""
        return memory

    def least_state(self, weights: float, trained: float, state: float, use: Use) -> float:
        """Return the lower bound of weights, gradients and optimizer state per rank."""
        return weights + trained + state


class CopiedWalk(Walk):
    """The memory of a rank that has a full copy of the parts."""

    def __init__(
        self, parts: Sequence[PartNumbers], *, keeps_gradients: bool, copies: int = 1
    ) -> None:
        self._parts = parts
        self._keeps = keeps_gradients
        self._gradients = copies * sum(part.trained for part in parts)

    def held(self) -> Held:
        return Held(
            sum(part.parameters for part in self._parts),
            sum(part.optimizer for part in self._parts),
            sum(part.buffers for part in self._parts),
        )

    def forward(self) -> list[Moment]:
        """Return each part's peak, on top of what earlier parts have saved."""
        moments, saved = [], 0.0
        there = self._gradients if self._keeps else 0.0
        for part in self._parts:
            moments.append(Moment("forward", saved + part.forward.peak, there))
            saved += part.saved
        return moments

    def backward(self) -> list[Moment]:
        """Return the peaks of backward; gradients are new, or added to existing ones."""
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
        return Moment("optimizer", extra, self._gradients)


def copies_with_buckets(parts: Sequence[PartNumbers], use: Use) -> CopiedWalk:
    """Return the memory of full copies whose gradients are in buckets from the first step on.

    Accumulated gradients that are not sent yet need memory in addition to the buckets.
    """
    accumulates, is_copied = use.accumulation > 1, use.layout.dp > 1
    copies = 2 if accumulates and is_copied else 1
    return CopiedWalk(parts, keeps_gradients=accumulates or is_copied, copies=copies)


def reduced_copies(trained: float, use: Use, times: float = 1.0) -> list[Exchange]:
    """Return the all-reduce of gradients in buckets, overlapped with the last backward."""
    if use.layout.dp_replicate == 1:
        return []
    calls = max(1.0, trained / BUCKET_BYTES)
    return [
        Exchange("all_reduce", ("dp_replicate",), trained, calls, times=times, beside="backward")
    ]


@cache
def cost_model(strategy: str) -> CostModel:
    """Return the cost model of the strategy with this name."""
    found: CostModel = load(traits_of(strategy).cost)
    return found
