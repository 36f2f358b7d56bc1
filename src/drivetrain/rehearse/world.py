"""A world of thousands of ranks: which ones are rehearsed, and how a process becomes one."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch.distributed as dist

from drivetrain.cluster.description import Cluster
from drivetrain.cluster.environments import detect
from drivetrain.config.schema import Parallel
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.parallel.layout import AXES, Coordinates, Layout
from drivetrain.parallel.world import World, join_world

# Which ranks represent all of them.
#
# Ranks differ by their pipeline stage and at the edges of each axis: the last shard may be short,
# and so may the last slice of the data. Stages are always rehearsed with their whole pipeline,
# because a stage learns from the previous one what it will receive.

SAMPLE, ALL_KINDS = "sample", "all-kinds"
_INSIDE = ("dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True)
class Chosen:
    """A rehearsed rank, and what it represents."""

    rank: int
    kind: str


def choose_ranks(layout: Layout, wanted: str) -> list[Chosen]:
    """Choose `sample` (the first rank and the last on each axis), `all-kinds` (every edge) or N."""
    if wanted == SAMPLE:
        corners = _one_edge_at_a_time(layout)
    elif wanted == ALL_KINDS:
        corners = _every_edge(layout)
    else:
        corners = _spread_out(layout, _number(wanted))
    places = [
        corner._replace(pp=stage) for corner in dict.fromkeys(corners) for stage in range(layout.pp)
    ]
    ranks = {layout.rank(place): place for place in places}
    return [Chosen(rank, _kind(layout, ranks[rank])) for rank in sorted(ranks)]


def speaker_for(rank: int, rehearsed: Iterable[int], layout: Layout) -> int:
    """Return the rehearsed rank most similar to another: same stage, then same samples."""
    wanted = layout.coordinates(rank)

    def likeness(other: int) -> tuple[bool, ...]:
        here = layout.coordinates(other)
        same_samples = (here.dp_replicate, here.dp_shard) == (wanted.dp_replicate, wanted.dp_shard)
        return here.pp == wanted.pp, same_samples, here.cp == wanted.cp, here.tp == wanted.tp

    return max(sorted(rehearsed), key=likeness)


def axes_of(ranks: tuple[int, ...], layout: Layout) -> str:
    """Return the axes that a group of ranks spans."""
    if len(ranks) == layout.world_size:
        return "all ranks"
    if layout.ep > 1 and ranks == layout.expert_group(ranks[0]):
        return "ep"
    first, last = layout.coordinates(ranks[0]), layout.coordinates(ranks[-1])
    if layout.ep > 1 and len(ranks) == layout.expert_shard and first.dp_shard != last.dp_shard:
        return "expert_shard"
    differing = [axis for axis in AXES if getattr(first, axis) != getattr(last, axis)]
    return " × ".join(differing) or "itself"


def _number(wanted: str) -> int:
    if wanted.isdigit() and int(wanted) > 0:
        return int(wanted)
    rule = "neither a way to choose ranks nor a number of ranks"
    raise ConfigError([Problem("--ranks", rule, "use sample, all-kinds or a number", wanted)])


def _one_edge_at_a_time(layout: Layout) -> Iterable[Coordinates]:
    yield Coordinates()
    for axis in _INSIDE:
        yield _at(**{axis: getattr(layout, axis) - 1})


def _every_edge(layout: Layout) -> Iterable[Coordinates]:
    edges = [sorted({0, getattr(layout, axis) - 1}) for axis in _INSIDE]
    for digits in product(*edges):
        yield _at(**dict(zip(_INSIDE, digits, strict=True)))


def _spread_out(layout: Layout, number: int) -> Iterable[Coordinates]:
    """Yield about `number` ranks, evenly spread over all pipelines, with the first and last."""
    per_stage = layout.world_size // layout.pp
    pipelines = min(per_stage, max(1, -(-number // layout.pp)))
    for turn in range(pipelines):
        first = turn * (per_stage - 1) // max(1, pipelines - 1)
        yield layout.coordinates(first)._replace(pp=0)


def _at(**digits: Any) -> Coordinates:
    return Coordinates()._replace(**digits)


def _kind(layout: Layout, where: Coordinates) -> str:
    words = []
    if layout.pp > 1:
        ends = {0: "first stage", layout.pp - 1: "last stage"}
        words.append(ends.get(where.pp, f"stage {where.pp}"))
    for axis in _INSIDE:
        size, digit = getattr(layout, axis), getattr(where, axis)
        if size > 1 and digit == size - 1:
            words.append(f"last along {axis}")
        elif digit:
            words.append(f"{axis} {digit}")
    return ", ".join(words) or "first rank"


# A world of thousands of ranks in one process, with torch's fake process group.


@dataclass(frozen=True)
class RehearsedWorld(World):
    """This process as one of many ranks, with the devices it would run on."""

    device_memory_bytes: int | None = None

    @property
    def cluster(self) -> Cluster:
        """Without this machine's device memory: usage is counted, and judged at the end."""
        per_node = self.identity.local_world_size
        return Cluster(max(1, self.layout.world_size // per_node), per_node, None)


def become_rank(rank: int, world_size: int, devices_per_node: int) -> None:
    """Set the variables and the process group that a launcher would give this rank."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    per_node = min(devices_per_node, world_size)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % per_node),
        "GROUP_RANK": str(rank // per_node),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(per_node),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    dist.init_process_group = _already_there


def _already_there(*_: Any, **__: Any) -> None:
    """Do nothing: a script that initializes a process group gets this one."""


def join(config: Parallel, device_memory_bytes: int | None) -> RehearsedWorld:
    """Return the world, with a mesh of thousands of ranks."""
    real = join_world(detect(), config)
    return RehearsedWorld(
        real.identity, real.layout, real.device, real.mesh, device_memory_bytes=device_memory_bytes
    )
