"""Memory per rank at the worst moment of a step, by what it is taken for.

A step is walked through part by part, forward and back. At each part: what earlier parts have
saved, what the part itself has alive at its worst, gradients so far, and what the strategy holds
beside them. The walk follows the code that runs: torch's AccumulateGrad, DDP's buckets (gradients
live in them from the first step on), FSDP2's gathers and reductions, 1F1B's micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from drivetrain.plan.candidate import Candidate
from drivetrain.plan.cost.context import rank_parts
from drivetrain.plan.cost.sharded_memory import Between, ShardedWalk
from drivetrain.plan.cost.stages import stage_parts
from drivetrain.plan.profile.model import ModelProfile
from drivetrain.plan.profile.numbers import PartNumbers


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
    """Weights put together and gradients on their way (fsdp, ZeRO), messages between stages."""
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


def worst_memory(
    profile: ModelProfile, candidate: Candidate, *, on_accelerator: bool = False
) -> Memory:
    """Of the rank that needs most."""
    stages = range(candidate.layout.pp)
    each = [stage_memory(profile, candidate, s, on_accelerator=on_accelerator) for s in stages]
    return max(each, key=lambda memory: memory.total)


def stage_memory(
    profile: ModelProfile, candidate: Candidate, stage: int, *, on_accelerator: bool = False
) -> Memory:
    """Of a rank of one pipeline stage."""
    layout = candidate.layout
    length = 1.0 / layout.cp
    numbers = rank_parts(profile, candidate)
    indices = stage_parts(profile, layout.pp)[stage]
    parts = [numbers[index] for index in indices]
    is_root = [index in (0, len(numbers) - 1) for index in indices]
    hidden = profile.hand_over_bytes.one(candidate.micro_batch_size, length, layout.tp)
    walk = _walk(candidate, parts, is_root, hidden)
    in_flight = _in_flight(candidate, stage)
    waiting = (in_flight - 1) * sum(part.saved for part in parts)
    messages = _message_bytes(candidate, stage, hidden)
    extra = _optimizer_extra(profile, parts, candidate, on_accelerator=on_accelerator)
    moments = [*walk.forward(), *walk.backward(), walk.optimizer(extra)]
    worst = max(moments, key=lambda m: m.activations + m.gradients + m.gathered)
    held = walk.held()
    inputs = profile.batch_bytes.one(candidate.micro_batch_size, length, layout.tp)
    return Memory(
        parameters=held.parameters,
        gradients=worst.gradients,
        optimizer=held.optimizer,
        buffers=held.buffers,
        activations=worst.activations + (0.0 if worst.name == "optimizer" else waiting),
        gathered=worst.gathered + messages,
        batch=inputs * (candidate.accumulation if layout.pp > 1 else 1),
        moment=worst.name,
    )


@dataclass(frozen=True)
class Moment:
    """One point of a step, beside what is always there."""

    name: str
    activations: float
    gradients: float
    gathered: float = 0.0


@dataclass(frozen=True)
class Held:
    """What is there all the time."""

    parameters: float
    optimizer: float
    buffers: float


class CopiedWalk:
    """A full copy of the parts on each rank: one device, ddp, tp and pp without shards."""

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


def _walk(
    candidate: Candidate, parts: Sequence[PartNumbers], is_root: Sequence[bool], hidden: float
) -> CopiedWalk | _Sharded:
    accumulates = candidate.accumulation > 1
    if candidate.strategy == "fsdp" and candidate.num_shards > 1:
        itemsize = 1.0 if candidate.precision == "fp32" else 0.5
        shards = candidate.num_shards
        between: Between = "whole" if candidate.accumulates_whole else "shards"
        if not accumulates:
            between = "none"
        return _Sharded(ShardedWalk(parts, is_root, shards, itemsize, hidden, between=between))
    is_ddp = candidate.layout.dp > 1
    # gradients of micro-batches that are not sent lie beside ddp's buckets, not in them
    copies = 2 if accumulates and is_ddp and candidate.strategy == "ddp" else 1
    return CopiedWalk(parts, keeps_gradients=accumulates or is_ddp, copies=copies)


class _Sharded:
    """FSDP2's walk, in this file's words."""

    def __init__(self, walk: ShardedWalk) -> None:
        self._walk = walk

    def held(self) -> Held:
        return Held(*self._walk.held())

    def forward(self) -> list[Moment]:
        return [Moment("forward", *point) for point in self._walk.forward()]

    def backward(self) -> list[Moment]:
        return [Moment("backward", *point) for point in self._walk.backward()]

    def optimizer(self, extra: float) -> Moment:
        return Moment("optimizer", extra, self._walk.gradient_shards())


def _in_flight(candidate: Candidate, stage: int) -> int:
    """Micro-batches whose forward is done and whose backward is not."""
    if candidate.layout.pp == 1:
        return 1
    if candidate.schedule == "gpipe":
        return candidate.accumulation
    return min(candidate.accumulation, candidate.layout.pp - stage)


def _message_bytes(candidate: Candidate, stage: int, hidden: float) -> float:
    """Stages of torch's keep a buffer per micro-batch for what comes in from either side.

    And one message is on its way out.
    """
    layout = candidate.layout
    sides = int(stage > 0) + int(stage < layout.pp - 1)
    return (sides * candidate.accumulation + 1) * hidden if layout.pp > 1 else 0.0


def _optimizer_extra(
    profile: ModelProfile,
    parts: Sequence[PartNumbers],
    candidate: Candidate,
    *,
    on_accelerator: bool,
) -> float:
    """On accelerators torch's optimizers work on all weights at once, elsewhere one by one."""
    if on_accelerator:
        return sum(part.trained for part in parts) / max(1, _optimizer_shards(candidate))
    return profile.optimizer_extra.one(1, 1.0, candidate.layout.tp) / _optimizer_shards(candidate)


def _optimizer_shards(candidate: Candidate) -> int:
    return candidate.num_shards if candidate.strategy in ("fsdp", "deepspeed") else 1


def without_offloaded(memory: Memory, candidate: Candidate) -> Memory:
    """What waits in the host's memory is not on the device."""
    if candidate.offload == "none":
        return memory
    if candidate.strategy == "deepspeed":
        return replace(memory, optimizer=0.0)
    # whole gradients of earlier micro-batches stay where they were made; shards go to the host
    gradients = memory.gradients if candidate.accumulates_whole else 0.0
    return replace(memory, parameters=0.0, optimizer=0.0, gradients=gradients)
