"""World: this rank, its device and the mesh, joined once per process."""

from __future__ import annotations

import atexit
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from drivetrain.cluster.description import Cluster
from drivetrain.cluster.environments import Identity
from drivetrain.config.schema import Parallel
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.core.plugins import load
from drivetrain.core.processes import is_failing
from drivetrain.core.traits import all_traits
from drivetrain.parallel.accelerator import (
    Accelerator,
    accelerator_of,
    chosen_device,
    takes_host_tensors,
    use_device,
    use_device_of,
)
from drivetrain.parallel.layout import AXES, FREE, Layout

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class World:
    """Everything a strategy needs to know about where it is applied."""

    identity: Identity
    layout: Layout
    device: torch.device
    mesh: DeviceMesh | None
    """None when there is only one rank: then nothing is ever sent."""
    host_group: dist.ProcessGroup | None = None
    """All ranks, for tensors on the CPU; None is the default group."""

    @property
    def accelerator(self) -> Accelerator:
        """What this rank's device can do."""
        return accelerator_of(self.device)

    @property
    def rank(self) -> int:
        return self.identity.rank

    @property
    def is_main(self) -> bool:
        """Whether this rank speaks for the run."""
        return self.identity.is_main

    @property
    def dp_index(self) -> int:
        """Which data-parallel slice this rank works on."""
        return self.layout.dp_index(self.rank)

    @property
    def speaks_for_samples(self) -> bool:
        """One of the ranks that work on the same samples: the first along tp and cp."""
        where = self.layout.coordinates(self.rank)
        return where.tp == 0 and where.cp == 0

    @property
    def _data_axes(self) -> list[str]:
        """Those in use that gradients are averaged over."""
        axes = ("dp_replicate", "dp_shard", "cp")
        return [axis for axis in axes if getattr(self.layout, axis) > 1]

    @cached_property
    def data_mesh(self) -> DeviceMesh | None:
        """The axes that gradients are averaged over; None when there is but one rank along them."""
        names = self._data_axes
        if self.mesh is None or not names:
            return None
        if {"dp_shard", "cp"} <= set(names):  # shards go over both
            flat = self.mesh["dp_shard", "cp"]._flatten("dp_shard_cp")  # noqa: SLF001 - its only name
            return self.mesh["dp_replicate", "dp_shard_cp"] if "dp_replicate" in names else flat
        return self.mesh[tuple(names)]

    @cached_property
    def expert_mesh(self) -> DeviceMesh | None:
        """All axes, with dp_shard in two: `ep` ranks that share experts, `expert_shard` of those.

        None where experts are not spread.
        """
        if self.mesh is None or self.layout.ep == 1:
            return None
        if not hasattr(self.mesh, "_unflatten"):
            rule = f"torch {torch.__version__} cannot divide an axis of a mesh"
            raise ConfigError([Problem("parallel.ep", rule, "use torch 2.13", self.layout.ep)])
        sizes = (self.layout.dp_shard // self.layout.ep, self.layout.ep)
        found: DeviceMesh = self.mesh._unflatten(  # noqa: SLF001 - its only name
            "dp_shard", sizes, ("expert_shard", "ep")
        )
        return found

    @cached_property
    def copies(self) -> dist.ProcessGroup | None:
        """The ranks that have the same part of the model; None when that is every rank."""
        groups = self.layout.groups(*self._data_axes)
        if len(groups) == 1:
            return None
        own: dist.ProcessGroup
        # as the default group, unless that takes no tensors of the host's: these must
        backend = None if self.host_group is None else self.accelerator.backend
        own, _ = dist.new_subgroups_by_enumeration([list(g) for g in groups], backend=backend)
        return own

    @property
    def is_first_copy(self) -> bool:
        """Whether this is the first of the ranks that have the same part of the model."""
        return self._is_first_along(self._data_axes)

    @property
    def leads_stage(self) -> bool:
        """Whether this is the first of the ranks that have the same layers of the model."""
        return self._is_first_along([axis for axis in AXES if axis != "pp"])

    def _is_first_along(self, axes: Sequence[str]) -> bool:
        return any(group[0] == self.rank for group in self.layout.groups(*axes))

    @property
    def cluster(self) -> Cluster:
        """The devices the ranks stand on."""
        per_node = self.identity.local_world_size
        memory = self.accelerator.memory_bytes
        if memory is not None and self.accelerator.is_cpu:
            memory //= per_node  # the ranks of a host share it
        return Cluster(max(1, self.layout.world_size // per_node), per_node, memory)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Add up a small tensor over all ranks, in place."""
        if self.mesh is not None:
            dist.all_reduce(values)
        return values

    def sum_floats(self, values: list[float]) -> list[float]:
        """Add up plain numbers over all ranks, on the host: no rank waits for its device."""
        if self.mesh is None:
            return values
        numbers = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(numbers, group=self.host_group)
        totals: list[float] = numbers.tolist()
        return totals

    def share_weights(self, model: nn.Module) -> None:
        """Rank 0's weights and buffers, on every rank."""
        if self.mesh is not None:
            for tensor in (*model.parameters(), *model.buffers()):
                on_host = tensor.device.type == "cpu"
                dist.broadcast(tensor.data, src=0, group=self.host_group if on_host else None)

    def agree(self, text: str, speaker: int = 0) -> str:
        """One rank's word, on every rank."""
        if self.mesh is None:
            return text
        words = [text]
        dist.broadcast_object_list(words, src=speaker, group=self.host_group)
        return words[0]

    def first_with(self, is_so: bool) -> int | None:
        """The lowest rank of which something is true."""
        none = self.layout.world_size
        lowest = torch.tensor(self.rank if is_so else none)
        if self.mesh is not None:
            dist.all_reduce(lowest, dist.ReduceOp.MIN, group=self.host_group)
        return None if int(lowest) == none else int(lowest)


def layout_from(config: Parallel, world_size: int) -> Layout:
    """The layout a config asks for; ranks of which nothing is said go where the strategy fills."""
    sizes = {
        "dp_replicate": config.dp_replicate,
        "dp_shard": config.dp_shard,
        "pp": config.pp,
        "cp": config.cp,
        "tp": config.tp,
        "ep": config.ep,
    }
    for axis, size in sizes.items():
        if size == "auto":
            sizes[axis] = FREE if axis == config.traits.fills else 1
    return Layout.resolve(world_size, **{axis: int(size) for axis, size in sizes.items()})


def join_world(identity: Identity, config: Parallel) -> World:
    """Meet the other ranks. A process group that is there already is used.

    The group stays until the process ends: a second fit(), or a collective of the user's own, needs
    it, and torchrun's store cannot be met at twice.
    """
    if dist.is_initialized():  # a group the script has made itself knows best
        identity = replace(identity, rank=dist.get_rank(), world_size=dist.get_world_size())
    layout = layout_from(config, identity.world_size)
    device = device_of(identity)
    if identity.world_size == 1:
        host_group = _host_group(config.timeout_s) if dist.is_initialized() else None
        return World(identity, layout, device, None, host_group)
    if not dist.is_initialized():
        _init_process_group(identity, device, config.timeout_s)
        atexit.register(_leave)
    mesh = layout.build_mesh(device.type)
    return World(identity, layout, device, mesh, _host_group(config.timeout_s))


def _host_group(timeout_s: float) -> dist.ProcessGroup | None:
    """A gloo group, where the script has made one that only takes its device's tensors."""
    if takes_host_tensors(dist.distributed_c10d._get_default_group()):  # noqa: SLF001 - as above
        return None
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    return group


def _leave() -> None:
    """A rank that fails leaves at once: taking NCCL's group apart would wait for its peers."""
    if dist.is_initialized() and not is_failing():
        dist.destroy_process_group()


def device_of(identity: Identity) -> torch.device:
    """The one the script has chosen for a group of its own, or that of the local rank."""
    if dist.is_initialized():
        bound = dist.distributed_c10d._get_default_group().bound_device_id  # noqa: SLF001
        if bound is not None:
            return use_device(bound)
        chosen = chosen_device()
        if chosen is not None:
            return chosen
    return use_device_of(identity.local_rank)


def _init_process_group(identity: Identity, device: torch.device, timeout_s: float) -> None:
    backend = accelerator_of(device).backend
    timeout = timedelta(seconds=timeout_s)
    if identity.environment in ("torchrun", "ray"):
        # env:// reuses the agent's store, so that no port is opened twice
        dist.init_process_group(backend, timeout=timeout)
        return
    launchers = [each.launcher for each in all_traits() if each.launcher is not None]
    own = next((each for each in launchers if each.environment == identity.environment), None)
    if own is not None:
        store, rank = load(own.rendezvous)(identity), identity.rank
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=identity.world_size, timeout=timeout
        )
        return
    dist.init_process_group(
        backend,
        init_method=f"tcp://{identity.main_address}:{identity.main_port}",
        rank=identity.rank,
        world_size=identity.world_size,
        timeout=timeout,
    )


# LiveWorld: a process that is a replica of its own, among others that come and go.
#
# It stands in no process group and in a layout of one rank; who else takes part is said by each
# step's quorum. Whoever sits first in it speaks for the run, so that the run never falls silent.


@dataclass
class ReplicaRank:
    """This replica's place in the latest quorum."""

    rank: int
    num_replicas: int


@dataclass(frozen=True)
class LiveWorld(World):
    """`identity` is the replica's name; its world size is how many the job was started with."""

    seat: ReplicaRank = field(default_factory=lambda: ReplicaRank(0, 1))

    @property
    def is_main(self) -> bool:
        """Whether this replica speaks for the run at present."""
        return self.seat.rank == 0

    @property
    def rank(self) -> int:
        """Inside its own group it is alone; `identity.rank` tells the replicas apart."""
        return 0


def live_world(identity: Identity) -> LiveWorld:
    """Meets nobody yet: the first quorum does."""
    seat = ReplicaRank(identity.rank, identity.world_size)
    return LiveWorld(identity, Layout(), device_of(identity), None, seat=seat)
