"""World: this rank, its device and the device mesh; joined once per process."""

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
    """This rank, its device, the layout and the mesh: what a strategy is applied to."""

    identity: Identity
    layout: Layout
    device: torch.device
    mesh: DeviceMesh | None
    """None if there is only one rank, which never communicates."""
    host_group: dist.ProcessGroup | None = None
    """Group of all ranks for CPU tensors; None: use the default group."""

    @property
    def accelerator(self) -> Accelerator:
        return accelerator_of(self.device)

    @property
    def rank(self) -> int:
        return self.identity.rank

    @property
    def is_main(self) -> bool:
        """True on the rank that reports for the run."""
        return self.identity.is_main

    @property
    def dp_index(self) -> int:
        """Index of the data-parallel slice that this rank works on."""
        return self.layout.dp_index(self.rank)

    @property
    def speaks_for_samples(self) -> bool:
        """True on the first rank along tp and cp, of the ranks that work on the same samples."""
        where = self.layout.coordinates(self.rank)
        return where.tp == 0 and where.cp == 0

    @property
    def _data_axes(self) -> list[str]:
        """The axes in use that gradients are averaged over."""
        axes = ("dp_replicate", "dp_shard", "cp")
        return [axis for axis in axes if getattr(self.layout, axis) > 1]

    @cached_property
    def data_mesh(self) -> DeviceMesh | None:
        """The mesh of the axes gradients are averaged over; None if they have only one rank."""
        names = self._data_axes
        if self.mesh is None or not names:
            return None
        if {"dp_shard", "cp"} <= set(names):  # shards go over both
            flat = self.mesh["dp_shard", "cp"]._flatten("dp_shard_cp")  # noqa: SLF001 - its only name
            return self.mesh["dp_replicate", "dp_shard_cp"] if "dp_replicate" in names else flat
        return self.mesh[tuple(names)]

    @cached_property
    def expert_mesh(self) -> DeviceMesh | None:
        """The mesh with dp_shard split into `expert_shard` and `ep`, the ranks that share experts.

        None without expert parallelism.
        """
        if self.mesh is None or self.layout.ep == 1:
            return None
        if not hasattr(self.mesh, "_unflatten"):
            rule = f"torch {torch.__version__} cannot split an axis of a mesh"
            raise ConfigError([Problem("parallel.ep", rule, "use torch 2.13", self.layout.ep)])
        sizes = (self.layout.dp_shard // self.layout.ep, self.layout.ep)
        found: DeviceMesh = self.mesh._unflatten(  # noqa: SLF001 - its only name
            "dp_shard", sizes, ("expert_shard", "ep")
        )
        return found

    @cached_property
    def copies(self) -> dist.ProcessGroup | None:
        """Group of the ranks that have the same part of the model; None if that is every rank."""
        groups = self.layout.groups(*self._data_axes)
        if len(groups) == 1:
            return None
        own: dist.ProcessGroup
        # same backend as the default group, unless that one takes no CPU tensors: this one must
        backend = None if self.host_group is None else self.accelerator.backend
        own, _ = dist.new_subgroups_by_enumeration([list(g) for g in groups], backend=backend)
        return own

    @property
    def is_first_copy(self) -> bool:
        """True on the first of the ranks that have the same part of the model."""
        return self._is_first_along(self._data_axes)

    @property
    def leads_stage(self) -> bool:
        """True on the first of the ranks that have the same layers of the model."""
        return self._is_first_along([axis for axis in AXES if axis != "pp"])

    def _is_first_along(self, axes: Sequence[str]) -> bool:
        return any(group[0] == self.rank for group in self.layout.groups(*axes))

    @property
    def cluster(self) -> Cluster:
        """The nodes and devices that the ranks use."""
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
        """Add up plain numbers over all ranks, on the host, without waiting for a device."""
        if self.mesh is None:
            return values
        numbers = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(numbers, group=self.host_group)
        totals: list[float] = numbers.tolist()
        return totals

    def share_weights(self, model: nn.Module) -> None:
        """Broadcast rank 0's weights and buffers to every rank, in place."""
        if self.mesh is not None:
            for tensor in (*model.parameters(), *model.buffers()):
                on_host = tensor.device.type == "cpu"
                dist.broadcast(tensor.data, src=0, group=self.host_group if on_host else None)

    def agree(self, text: str, speaker: int = 0) -> str:
        """Return the text of rank `speaker` on every rank. A collective call."""
        if self.mesh is None:
            return text
        words = [text]
        dist.broadcast_object_list(words, src=speaker, group=self.host_group)
        return words[0]

    def first_with(self, is_so: bool) -> int | None:
        """Return the lowest rank on which `is_so` is true, or None. A collective call."""
        none = self.layout.world_size
        lowest = torch.tensor(self.rank if is_so else none)
        if self.mesh is not None:
            dist.all_reduce(lowest, dist.ReduceOp.MIN, group=self.host_group)
        return None if int(lowest) == none else int(lowest)


def layout_from(config: Parallel, world_size: int) -> Layout:
    """Return the configured layout; remaining ranks go to the axis that the strategy fills."""
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
    """Join the other ranks. An existing process group is used.

    The group stays until the process ends: a second fit() or the user's own collectives need it,
    and torchrun's store cannot be used for a second rendezvous.
    """
    if dist.is_initialized():  # a group that the script has created takes precedence
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
    """Return a gloo group if the script's own group takes only device tensors; else None."""
    if takes_host_tensors(dist.distributed_c10d._get_default_group()):  # noqa: SLF001 - as above
        return None
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    return group


def _leave() -> None:
    """Destroy the group, except on a failing rank: with NCCL that would wait for its peers."""
    if dist.is_initialized() and not is_failing():
        dist.destroy_process_group()


def device_of(identity: Identity) -> torch.device:
    """Return the device that the script chose for its own group, or the local rank's device."""
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


# LiveWorld: a process that is its own replica, among others that come and go.
#
# It is in no process group and has a layout of one rank; each step's quorum determines which
# replicas take part. The first of the quorum reports for the run, so there is always one.


@dataclass
class ReplicaRank:
    """This replica's place in the latest quorum."""

    rank: int
    num_replicas: int


@dataclass(frozen=True)
class LiveWorld(World):
    """`identity` names the replica; its world size is the number that the job started with."""

    seat: ReplicaRank = field(default_factory=lambda: ReplicaRank(0, 1))

    @property
    def is_main(self) -> bool:
        """True while this replica reports for the run."""
        return self.seat.rank == 0

    @property
    def rank(self) -> int:
        """Always 0: it is alone in its group; `identity.rank` identifies the replica."""
        return 0


def live_world(identity: Identity) -> LiveWorld:
    """Return a world that has not joined others yet: the first quorum does that."""
    seat = ReplicaRank(identity.rank, identity.world_size)
    return LiveWorld(identity, Layout(), device_of(identity), None, seat=seat)
