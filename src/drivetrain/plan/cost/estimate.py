"""Estimate: the cost of one candidate in bytes, seconds and money, and whether it fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from drivetrain.cluster.description import Cluster
from drivetrain.plan.candidate import Candidate
from drivetrain.plan.cost.parts import rank_parts, stage_parts
from drivetrain.plan.cost.timing import StepTime, step_time
from drivetrain.plan.profile.model import ModelProfile, Way
from drivetrain.plan.profile.profiling import Profiler
from drivetrain.strategies.cost import Memory, PartNumbers

# Memory per rank at the peak of a step, by purpose.
#
# A step is simulated part by part, forward and backward. Each part counts what earlier parts have
# saved, its own peak, the gradients so far, and what the strategy holds in addition. The strategy
# defines this walk (`CostModel.walk`); the micro-batches in flight and the messages of pipeline
# schedules are added here.


def worst_memory(
    profile: ModelProfile, candidate: Candidate, *, on_accelerator: bool = False
) -> Memory:
    """Return the memory of the rank that needs most."""
    stages = range(candidate.layout.pp)
    each = [stage_memory(profile, candidate, s, on_accelerator=on_accelerator) for s in stages]
    return max(each, key=lambda memory: memory.total)


def stage_memory(
    profile: ModelProfile, candidate: Candidate, stage: int, *, on_accelerator: bool = False
) -> Memory:
    """Return the memory of a rank of one pipeline stage."""
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
    """Return the number of micro-batches between their forward and their backward."""
    if candidate.layout.pp == 1:
        return 1
    if candidate.schedule == "gpipe":
        return candidate.accumulation
    return min(candidate.accumulation, candidate.layout.pp - stage)


def _message_bytes(candidate: Candidate, stage: int, hidden: float) -> float:
    """Return the bytes of messages between stages.

    torch's stages keep a receive buffer per micro-batch and side, and one message is being sent.
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
    """Return the optimizer's temporary memory.

    On accelerators torch's optimizers update all weights at once, elsewhere one by one.
    """
    shards = candidate.cost.step_shards(candidate.use)
    if on_accelerator:
        return sum(part.trained for part in parts) / shards
    return profile.optimizer_extra.one(1, 1.0, candidate.layout.tp) / shards


# Not part of any trace: the driver's context, communication buffers, and the fragmentation of the
# caching allocator. Not measured (there was no GPU); round and conservative values.
CONTEXT_BYTES = 1.5 * 2**30
FRAGMENTED = 0.06
HOST_MARGIN = 0.03


@dataclass(frozen=True)
class Estimate:
    """A candidate with its predicted cost."""

    candidate: Candidate
    memory: Memory
    """Memory of the rank that needs most."""
    time: StepTime
    memory_limit_bytes: float
    checkpoint_bytes: float
    checkpoint_s: float | None
    price_per_step: float | None
    samples_per_s: float
    tokens_per_s: float | None
    utilization: float | None
    """Fraction of the data sheet's peak rate, counting the model's own operations."""

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.memory_limit_bytes


def memory_limit(cluster: Cluster) -> float:
    """Return how much of a device's memory a step may use."""
    memory = cluster.device_memory_bytes or float("inf")
    if cluster.device is not None and not cluster.device.is_accelerator:
        return memory * (1.0 - HOST_MARGIN)
    return memory * (1.0 - FRAGMENTED) - CONTEXT_BYTES


def rank_memory(profiler: Profiler, candidate: Candidate, *, on_accelerator: bool) -> Memory:
    """Return the on-device memory of the rank that needs most."""
    profile = profiler.profile(candidate.way)
    pp = candidate.layout.pp
    stages = range(pp) if pp <= 4 else (0, 1, pp - 2, pp - 1)
    each = [
        stage_memory(profile, candidate, stage, on_accelerator=on_accelerator) for stage in stages
    ]
    return candidate.cost.on_device(max(each, key=lambda memory: memory.total), candidate.use)


def estimate(profiler: Profiler, candidate: Candidate, cluster: Cluster) -> Estimate:
    accelerated = cluster.device is None or cluster.device.is_accelerator
    memory = rank_memory(profiler, candidate, on_accelerator=accelerated)
    profile = profiler.profile(candidate.way)
    plain = profiler.profile(_without_recompute(candidate).way)
    time = step_time(profile, plain, candidate, cluster)
    nodes = -(-candidate.layout.world_size // cluster.devices_per_node)
    price = cluster.price_per_node_hour
    whole = profiler.profile(Way(candidate.precision))
    checkpoint = whole.total("parameters") + whole.total("optimizer")
    storage = cluster.storage_bytes_per_s
    samples = candidate.global_batch_size / time.total
    tokens = profiler.subject.tokens_per_sample
    return Estimate(
        candidate,
        memory,
        time,
        memory_limit(cluster),
        checkpoint,
        checkpoint / (storage * nodes) if storage else None,
        price * nodes * time.total / 3600 if price is not None else None,
        samples,
        samples * tokens if tokens is not None else None,
        _utilization(whole.flops(1.0), samples, candidate, cluster),
    )


def _without_recompute(candidate: Candidate) -> Candidate:
    return replace(candidate, recompute="none")


def _utilization(
    flops_per_sample: float, samples_per_s: float, candidate: Candidate, cluster: Cluster
) -> float | None:
    peaks = cluster.device.peak_flops if cluster.device is not None else {}
    peak = peaks.get(candidate.precision)
    if not peak:
        return None
    return flops_per_sample * samples_per_s / (peak * candidate.layout.world_size)
