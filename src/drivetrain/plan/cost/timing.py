"""Seconds per step, by purpose.

Compute: matrix products at the rate of large products, other operations at memory bandwidth.
Communication: the time of a ring; what the program overlaps with computation is hidden as far as
the device can. Pipelines: the slowest stage, and the bubble. Nothing is fitted to a model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from drivetrain.cluster.description import Cluster, Device, Link
from drivetrain.cluster.exchange import hops, passes
from drivetrain.config.schema import Pipeline
from drivetrain.parallel.layout import AXES, Layout
from drivetrain.parallel.pipeline.schedules import bubble
from drivetrain.plan.candidate import Candidate
from drivetrain.plan.cost.parts import rank_parts, stage_parts
from drivetrain.plan.profile.model import ModelProfile
from drivetrain.strategies.cost import Exchange, PartNumbers, WorkNumbers

# The time of an exchange between ranks, inside a node or across nodes.


@dataclass(frozen=True)
class Ring:
    """Ranks that communicate along some axes."""

    num_ranks: int
    link: Link

    def seconds(self, kind: str, num_bytes: float, calls: float = 1.0) -> float:
        """Return the time of `calls` exchanges of `num_bytes` in total (of full tensors)."""
        n = self.num_ranks
        if n == 1 or num_bytes <= 0:
            return 0.0
        rate, latency = self.link.by_kind.get(kind, (self.link.bytes_per_s, self.link.latency_s))
        return passes(kind, n) * num_bytes / rate + calls * hops(kind, n) * latency


def ring_along(layout: Layout, cluster: Cluster, *axes: str) -> Ring:
    """Return the ring of the ranks that differ only along `axes`.

    Ranks are numbered with tp innermost, so inner axes stay inside a node. A ring that crosses
    nodes uses as many network ports of each node as it has ranks there.
    """
    sizes = _axis_sizes(layout, axes)
    number = math.prod(sizes[axis] for axis in axes)
    stride, inside = 1, 1
    for axis in reversed(sizes):
        if axis in axes:
            room = max(1, cluster.devices_per_node // stride)
            inside *= min(sizes[axis], room) if stride <= cluster.devices_per_node else 1
        stride *= sizes[axis]
    inside = min(inside, number)
    return Ring(number, _slowest(cluster, number, inside))


_AXES_WITH_EXPERTS = ("pp", "dp_replicate", "expert_shard", "ep", "cp", "tp")


def _axis_sizes(layout: Layout, axes: Sequence[str]) -> dict[str, int]:
    """Return sizes, outermost first; dp_shard as two axes if `axes` has one of the two."""
    is_split = "ep" in axes or "expert_shard" in axes
    return {axis: getattr(layout, axis) for axis in (_AXES_WITH_EXPERTS if is_split else AXES)}


def neighbours_along(layout: Layout, cluster: Cluster, axis: str) -> Link:
    """Return the link between two neighbours along one axis."""
    sizes = dict(zip(AXES, layout.sizes, strict=True))
    stride = math.prod(sizes[a] for a in AXES[AXES.index(axis) + 1 :])
    is_inside = stride * sizes[axis] <= cluster.devices_per_node
    link = cluster.inside if is_inside else cluster.between
    return link or Link(math.inf)


def _slowest(cluster: Cluster, number: int, inside: int) -> Link:
    within = cluster.inside or Link(math.inf)
    if inside >= number or cluster.between is None:
        return within
    between = cluster.between
    # measurements of single collectives are for rings with one rank per node
    by_kind = between.by_kind if inside == 1 else {}
    across = Link(between.bytes_per_s * inside, between.latency_s, by_kind)
    return (
        across
        if across.bytes_per_s <= within.bytes_per_s
        else Link(within.bytes_per_s, across.latency_s)
    )


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step."""

    compute: float
    recompute: float
    """The part of backward that repeats forward."""
    exchange: dict[str, float]
    """Exposed communication, by axis."""
    bubble: float
    optimizer: float
    hidden: float = 0.0
    """Communication hidden by computation; not part of the total."""

    @property
    def total(self) -> float:
        return sum(self.components().values())

    def components(self) -> dict[str, float]:
        named = {f"exchange {axis}": s for axis, s in self.exchange.items() if s > 0}
        return {
            "compute": self.compute,
            "recompute": self.recompute,
            **named,
            "bubble": self.bubble,
            "optimizer": self.optimizer,
        }


@dataclass(frozen=True)
class _Stage:
    """Seconds of one micro-batch in one stage."""

    forward: float
    backward: float
    exchange: dict[str, float]
    """By axis: communication within layers, without overlap."""


def step_time(
    profile: ModelProfile, plain: ModelProfile, candidate: Candidate, cluster: Cluster
) -> StepTime:
    """Return the time of one step. `plain` is the profile without recomputation."""
    device = _device(cluster)
    layout = candidate.layout
    numbers = rank_parts(profile, candidate)
    once = rank_parts(plain, candidate)
    stages = stage_parts(profile, layout.pp)
    times = [_stage(numbers, parts, candidate, cluster) for parts in stages]
    slowest = max(range(len(stages)), key=lambda i: times[i].forward + times[i].backward)
    stage = times[slowest]
    parts = [numbers[i] for i in stages[slowest]]
    turns = candidate.accumulation
    again = sum(
        _seconds(numbers[i].backward, device, candidate.precision)
        - _seconds(once[i].backward, device, candidate.precision)
        for i in stages[slowest]
    )
    again = max(0.0, again)
    work = turns * (stage.forward + stage.backward)
    is_root = [i in (0, len(numbers) - 1) for i in stages[slowest]]
    exchange, hidden = _data_exchange(parts, is_root, stage, candidate, cluster)
    inside = {axis: turns * seconds for axis, seconds in stage.exchange.items()}
    exchange |= inside
    exchange["cp"] = _context_exchange(profile, candidate, cluster)
    exchange["pp"] = _hand_over(profile, candidate, cluster)
    idle = bubble(Pipeline(schedule=candidate.schedule), layout.pp, turns) if layout.pp > 1 else 0.0
    busy = work + sum(inside.values())
    return StepTime(
        compute=work - turns * again,
        recompute=turns * again,
        exchange=exchange,
        bubble=busy * idle / (1.0 - idle),
        optimizer=_optimizer(profile, parts, candidate, cluster),
        hidden=hidden,
    )


def _device(cluster: Cluster) -> Device:
    if cluster.device is None:
        raise ValueError("the cluster description has no figures for its device")
    return cluster.device


def _stage(
    numbers: Sequence[PartNumbers],
    parts: tuple[int, ...],
    candidate: Candidate,
    cluster: Cluster,
) -> _Stage:
    device = _device(cluster)
    counts = {index: parts.count(index) for index in set(parts)}
    rings = {axis: ring_along(candidate.layout, cluster, axis) for axis in ("tp", "ep")}
    exchange = dict.fromkeys(rings, 0.0)
    forward = backward = 0.0
    for index, count in counts.items():
        part = numbers[index]
        is_shared = candidate.layout.tp > 1
        forward += count * _seconds(part.forward, device, candidate.precision, is_shared=is_shared)
        backward += count * _seconds(
            part.backward, device, candidate.precision, is_shared=is_shared
        )
        for axis, kind, size, calls in (*part.forward.exchanges, *part.backward.exchanges):
            exchange[axis] += count * rings[axis].seconds(kind, size, calls)
    return _Stage(forward, backward, exchange)


def _seconds(
    work: WorkNumbers, device: Device, precision: str, *, is_shared: bool = False
) -> float:
    rate = device.flops.get(precision) or device.flops["fp32"]
    if device.small_product_flops and work.num_products:
        each = work.flops / work.num_products
        rate *= each / (each + device.small_product_flops)
    attention = device.attention_flops.get(precision) or device.flops.get(precision) or rate
    curved = device.curved_bytes_per_s or device.memory_bytes_per_s
    busy = (
        work.flops / rate
        + work.attention_flops / attention
        + (work.moved_bytes - work.curved_bytes) / device.memory_bytes_per_s
        + work.curved_bytes / curved
    )
    calls = work.num_operations * device.operation_s
    calls += work.num_products * device.shared_product_s * is_shared
    # an accelerator works while the host prepares the next operations
    return max(busy, calls) if device.is_accelerator else busy + calls


def _data_exchange(
    parts: Sequence[PartNumbers],
    is_root: Sequence[bool],
    stage: _Stage,
    candidate: Candidate,
    cluster: Cluster,
) -> tuple[dict[str, float], float]:
    """Return the strategy's communication: (exposed by axis, hidden).

    Exchanges on the same axes that overlap the same computation are combined.
    """
    device = _device(cluster)
    together: dict[tuple[tuple[str, ...], str], list[Exchange]] = {}
    for each in candidate.cost.exchanges(parts, is_root, candidate.use):
        together.setdefault((each.axes, each.beside), []).append(each)
    exposed: dict[str, float] = {}
    hidden = 0.0
    for (axes, beside), exchanges in together.items():
        ring = ring_along(candidate.layout, cluster, *axes)
        seconds = sum(
            each.times * ring.seconds(each.kind, each.num_bytes, each.calls) for each in exchanges
        )
        room = {"forward": stage.forward, "backward": stage.backward, "nothing": 0.0}[beside]
        first = exchanges[0]
        covered = min(seconds * device.overlap * (1.0 - 1.0 / first.pieces), first.turns * room)
        units = sum(each.units for each in exchanges) * device.sharded_unit_s
        exposed[axes[0]] = exposed.get(axes[0], 0.0) + seconds - covered + units
        hidden += covered
    return exposed, hidden


def _context_exchange(profile: ModelProfile, candidate: Candidate, cluster: Cluster) -> float:
    """Return the time to exchange keys and values of the full sequence and their gradients.

    They are gathered in every block: in forward, in backward and, if enabled, in recomputation.
    """
    layout = candidate.layout
    if layout.cp == 1:
        return 0.0
    hidden = profile.hand_over_bytes.one(candidate.micro_batch_size, 1.0, layout.tp)
    ring = ring_along(layout, cluster, "cp")
    blocks = profile.shape.num_blocks / layout.pp
    gathers = 2 if candidate.recompute == "none" else 3
    each = gathers * ring.seconds("all_gather", 2 * hidden, 2)
    each += ring.seconds("reduce_scatter", 2 * hidden, 2)
    return candidate.accumulation * blocks * each


def _hand_over(profile: ModelProfile, candidate: Candidate, cluster: Cluster) -> float:
    """Return the time for hidden states between stages: a message each way per micro-batch."""
    layout, device = candidate.layout, _device(cluster)
    if layout.pp == 1:
        return 0.0
    link = neighbours_along(layout, cluster, "pp")
    size = profile.hand_over_bytes.one(candidate.micro_batch_size, 1.0 / layout.cp, layout.tp)
    each = size / link.bytes_per_s + link.latency_s
    exposed = 2 * (layout.pp - 1) + 2 * candidate.accumulation * (1.0 - device.overlap)
    return exposed * each


def _optimizer(
    profile: ModelProfile, parts: Sequence[PartNumbers], candidate: Candidate, cluster: Cluster
) -> float:
    device = _device(cluster)
    shards = candidate.cost.num_shards(candidate.use)
    trained = sum(part.trained for part in parts) / shards
    moved = trained * profile.optimizer_moved
    calls = sum(part.num_weights for part in parts) * profile.optimizer_operations
    if candidate.offload == "cpu" and device.is_accelerator:
        host = cluster.host_link.bytes_per_s if cluster.host_link else 12e9
        # transfer of weights and gradients, and the step itself at the host's memory bandwidth
        return 2 * trained / host + moved / _HOST_BYTES_PER_S
    if device.is_accelerator:
        return moved / device.memory_bytes_per_s
    return moved / device.memory_bytes_per_s + calls * device.operation_s


# assumed for one of eight processes that share a server's memory
_HOST_BYTES_PER_S = 20e9


@lru_cache(maxsize=1)
def assumptions() -> tuple[str, ...]:
    """Return what is assumed and not measured, for reports."""
    return (
        "attention is counted in full, as torch counts it, even where it is causal",
        "an exchange is a ring; links are not shared with other jobs",
        "loading data is faster than the step",
    )
