"""A world of thousands of ranks in one process: torch's fake process group."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from drivetrain.cluster.description import Cluster
from drivetrain.cluster.environments import detect
from drivetrain.config.schema import Parallel
from drivetrain.parallel.world import World, join_world


@dataclass(frozen=True)
class RehearsedWorld(World):
    """This process as one rank of many; the devices are those it would run on."""

    device_memory_bytes: int | None = None

    @property
    def cluster(self) -> Cluster:
        """Not this machine's: memory is counted while it is used, and judged at the end."""
        per_node = self.identity.local_world_size
        return Cluster(max(1, self.layout.world_size // per_node), per_node, None)


def become_rank(rank: int, world_size: int, devices_per_node: int) -> None:
    """The variables and the process group that a launcher would have given this rank."""
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
    """A script that makes its own group finds this one."""


def join(config: Parallel, device_memory_bytes: int | None) -> RehearsedWorld:
    """The world, with a mesh of thousands of ranks."""
    real = join_world(detect(), config)
    return RehearsedWorld(
        real.identity, real.layout, real.device, real.mesh, device_memory_bytes=device_memory_bytes
    )
