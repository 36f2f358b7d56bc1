"""Settings for NCCL that fit the network found, each with its reason.

They follow NCCL's, libfabric's and the aws-ofi-nccl plug-in's documentation; none of them has been
run on such hardware here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from drivetrain.doctor.checks.names import suggested
from drivetrain.doctor.facts import Adapter, HostFacts

Fabric = Literal["efa", "infiniband", "roce", "ethernet"]


@dataclass(frozen=True)
class Setting:
    """An environment variable to export before the run."""

    name: str
    value: str
    reason: str


def fabric_of(host: HostFacts) -> Fabric:
    """The fastest way out of the host; adapters that are down do not count."""
    kinds = {adapter.kind for adapter in host.adapters if adapter.is_up}
    order: tuple[Fabric, ...] = ("efa", "infiniband", "roce")
    return next((kind for kind in order if kind in kinds), "ethernet")


def settings_for(host: HostFacts) -> list[Setting]:
    """What to export for this host's fabric."""
    fabric = fabric_of(host)
    adapters = [each for each in host.adapters if each.kind == fabric and each.is_up]
    return [*_bootstrap(host), *_data_path(fabric, adapters, host)]


def _bootstrap(host: HostFacts) -> Iterator[Setting]:
    interface = suggested(host)
    if interface is not None:
        reason = "ranks find each other over it; else a container bridge may be taken"
        yield Setting("NCCL_SOCKET_IFNAME", f"={interface}", reason)
        yield Setting("GLOO_SOCKET_IFNAME", interface, "the same for gloo, which takes no `=`")


def _data_path(fabric: Fabric, adapters: list[Adapter], host: HostFacts) -> Iterator[Setting]:
    has_peer_memory = bool({"nvidia_peermem", "nv_peer_mem"} & set(host.modules))
    names = ",".join(adapter.name for adapter in adapters)
    if fabric == "ethernet":
        reason = "there is no InfiniBand: without it NCCL searches for one, and says so in its log"
        yield Setting("NCCL_IB_DISABLE", "1", reason)
        reason = "one thread does not fill a link of 25 Gbit/s and more; on slower ones 1 is enough"
        yield Setting("NCCL_SOCKET_NTHREADS", "4", reason)
        reason = "several sockets per thread share the load over a link's queues"
        yield Setting("NCCL_NSOCKS_PERTHREAD", "4", reason)
    if fabric in ("infiniband", "roce"):
        reason = "these are up; a port that is down, or for storage, would be tried else"
        yield Setting("NCCL_IB_HCA", f"={names}", reason)
    if fabric == "roce":
        reason = "RoCE v2 over IPv4 is GID 3 on most cards; `show_gids` lists them"
        yield Setting("NCCL_IB_GID_INDEX", "3", reason)
    if fabric in ("infiniband", "roce") and not has_peer_memory:
        reason = "nvidia_peermem is not loaded, and GPUs cannot be read by the card directly;"
        yield Setting("NCCL_NET_GDR_LEVEL", "LOC", f"{reason} `modprobe nvidia_peermem` is better")
    if fabric == "efa":
        yield Setting("FI_PROVIDER", "efa", "libfabric is not to fall back to TCP in silence")
        reason = "the plug-in aws-ofi-nccl carries NCCL over EFA; without it NCCL uses TCP"
        yield Setting("NCCL_NET_PLUGIN", "ofi", reason)
        reason = "ranks that fork loader processes would corrupt registered memory else"
        yield Setting("FI_EFA_FORK_SAFE", "1", reason)
