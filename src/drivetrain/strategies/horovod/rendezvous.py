"""Initialize Horovod and torch's process group on the same ranks, whichever exists first.

Under horovodrun, Horovod knows the ranks and broadcasts the address at which torch's process group
connects. Under any other launcher, rank 0 opens the rendezvous that horovodrun would have opened,
and torch broadcasts its address.
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from drivetrain.cluster.environments import Identity
from drivetrain.core.errors import EnvironmentProblem, Problem
from drivetrain.parallel.world import World

_NAME = "drivetrain.store"
"""By default, Horovod names a broadcast after the object's type, which only rank 0 knows."""
_servers: list[Any] = []
"""Rank 0's rendezvous, for as long as the process lives."""


def load_horovod() -> ModuleType:
    """Return horovod.torch, or raise with how to build it: Horovod has no wheels."""
    try:
        return importlib.import_module("horovod.torch")
    except ModuleNotFoundError as error:
        remedy = "`make horovod` builds and installs it; see the page on Horovod"
        problem = Problem("horovod", "is not installed", remedy, has_value=False)
        raise EnvironmentProblem([problem]) from error


def join_over_horovod(identity: Identity) -> TCPStore:
    """Return a store for torch's process group under horovodrun, on a port that rank 0 opens."""
    hvd = load_horovod()
    hvd.init()
    if identity.is_main:
        host = os.environ.get("HOROVOD_HOSTNAME", identity.main_address)
        store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        hvd.broadcast_object((host, store.port), root_rank=0, name=_NAME)
        return store
    host, port = hvd.broadcast_object(None, root_rank=0, name=_NAME)
    return TCPStore(host, port, is_master=False)


def start_horovod(world: World) -> ModuleType:
    """Initialize Horovod on the existing ranks."""
    hvd = load_horovod()
    if not hvd.is_initialized():
        if "HOROVOD_RANK" not in os.environ and world.mesh is not None:
            os.environ.update(_as_horovodrun_would(world.identity))
        hvd.init()
    return hvd


def _as_horovodrun_would(identity: Identity) -> dict[str, str]:
    """Return the variables that horovodrun sets, with our own rendezvous. A collective call."""
    everyone: list[Any] = [None] * identity.world_size
    dist.all_gather_object(everyone, identity)
    nodes = len({each.node_rank for each in everyone})
    where = [(_open_rendezvous(everyone) if identity.is_main else 0)]
    dist.broadcast_object_list(where, src=0)
    interface = os.environ.get("GLOO_SOCKET_IFNAME") or ("lo" if nodes == 1 else "")
    variables = {
        "HOROVOD_HOSTNAME": _node(identity),
        "HOROVOD_RANK": identity.rank,
        "HOROVOD_SIZE": identity.world_size,
        "HOROVOD_LOCAL_RANK": identity.local_rank,
        "HOROVOD_LOCAL_SIZE": identity.local_world_size,
        "HOROVOD_CROSS_RANK": identity.node_rank,
        "HOROVOD_CROSS_SIZE": nodes,
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": identity.main_address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": where[0],
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        **({"HOROVOD_GLOO_IFACE": interface} if interface else {}),
    }
    return {name: str(value) for name, value in variables.items()}


def _open_rendezvous(everyone: list[Identity]) -> int:
    """Start, on rank 0, the server that horovodrun would run; return its port."""
    hosts = importlib.import_module("horovod.runner.common.util.hosts")
    server = importlib.import_module("horovod.runner.http.http_server").RendezvousServer()
    port = int(server.start())
    nodes = len({each.node_rank for each in everyone})
    server.init(
        [
            hosts.SlotInfo(
                hostname=_node(each),
                rank=each.rank,
                local_rank=each.local_rank,
                cross_rank=each.node_rank,
                size=each.world_size,
                local_size=each.local_world_size,
                cross_size=nodes,
            )
            for each in everyone
        ]
    )
    _servers.append(server)
    return port


def _node(identity: Identity) -> str:
    """Return a name that only tells Horovod which ranks share a machine."""
    return f"node-{identity.node_rank}"
