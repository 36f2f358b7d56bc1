"""Memory per rank at the worst moment of a step, by what it is taken for.

A step is walked through part by part, forward and back. At each part: what earlier parts have
saved, what the part itself has alive at its worst, gradients so far, and what the strategy holds
beside them. How it goes through a step, the strategy says (`CostModel.walk`); 1F1B's micro-batches
and its messages come on top here.
"""

from __future__ import annotations

from collections.abc import Sequence

from drivetrain.plan.candidate import Candidate
from drivetrain.plan.cost.context import rank_parts
from drivetrain.plan.cost.stages import stage_parts
from drivetrain.plan.profile.model import ModelProfile
from drivetrain.strategies.cost import Memory, PartNumbers


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
    walk = candidate.cost.walk(parts, is_root, hidden, candidate.use)
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
    shards = candidate.cost.step_shards(candidate.use)
    if on_accelerator:
        return sum(part.trained for part in parts) / shards
    return profile.optimizer_extra.one(1, 1.0, candidate.layout.tp) / shards
