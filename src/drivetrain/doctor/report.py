"""What was examined and found, and the NCCL settings that fit: as text and as JSON."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Literal

from drivetrain.core.finding import EnvironmentFinding
from drivetrain.core.text import readable_bytes
from drivetrain.doctor.checks.network import suggested
from drivetrain.doctor.facts import Adapter, Examination, HostFacts, HostLink
from drivetrain.doctor.host import SHM
from drivetrain.doctor.network import collective_address, nccl_interface

# Settings for NCCL that fit the network found, each with its reason.
#
# They follow NCCL's, libfabric's and the aws-ofi-nccl plug-in's documentation; none of them has
# been run on such hardware here.

Fabric = Literal["efa", "infiniband", "roce", "ethernet"]


@dataclass(frozen=True)
class NCCLSetting:
    """An environment variable to export before the run."""

    name: str
    value: str
    reason: str


def fabric_of(host: HostFacts) -> Fabric:
    """The fastest way out of the host; adapters that are down do not count."""
    kinds = {adapter.kind for adapter in host.adapters if adapter.is_up}
    order: tuple[Fabric, ...] = ("efa", "infiniband", "roce")
    return next((kind for kind in order if kind in kinds), "ethernet")


def settings_for(host: HostFacts) -> list[NCCLSetting]:
    """What to export for this host's fabric."""
    fabric = fabric_of(host)
    adapters = [each for each in host.adapters if each.kind == fabric and each.is_up]
    return [*_bootstrap(host), *_data_path(fabric, adapters, host)]


def _bootstrap(host: HostFacts) -> Iterator[NCCLSetting]:
    interface = suggested(host)
    if interface is not None:
        reason = "ranks find each other over it; else a container bridge may be taken"
        yield NCCLSetting("NCCL_SOCKET_IFNAME", f"={interface}", reason)
        yield NCCLSetting("GLOO_SOCKET_IFNAME", interface, "the same for gloo, which takes no `=`")


def _data_path(fabric: Fabric, adapters: list[Adapter], host: HostFacts) -> Iterator[NCCLSetting]:
    has_peer_memory = bool({"nvidia_peermem", "nv_peer_mem"} & set(host.modules))
    names = ",".join(adapter.name for adapter in adapters)
    if fabric == "ethernet":
        reason = "there is no InfiniBand: without it NCCL searches for one, and says so in its log"
        yield NCCLSetting("NCCL_IB_DISABLE", "1", reason)
        reason = "one thread does not fill a link of 25 Gbit/s and more; on slower ones 1 is enough"
        yield NCCLSetting("NCCL_SOCKET_NTHREADS", "4", reason)
        reason = "several sockets per thread share the load over a link's queues"
        yield NCCLSetting("NCCL_NSOCKS_PERTHREAD", "4", reason)
    if fabric in ("infiniband", "roce"):
        reason = "these are up; a port that is down, or for storage, would be tried else"
        yield NCCLSetting("NCCL_IB_HCA", f"={names}", reason)
    if fabric in ("infiniband", "roce") and not has_peer_memory:
        reason = "nvidia_peermem is not loaded, and GPUs cannot be read by the card directly;"
        yield NCCLSetting(
            "NCCL_NET_GDR_LEVEL", "LOC", f"{reason} `modprobe nvidia_peermem` is better"
        )
    if fabric == "efa":
        yield NCCLSetting("FI_PROVIDER", "efa", "libfabric is not to fall back to TCP in silence")
        reason = "the plug-in aws-ofi-nccl carries NCCL over EFA; named, its absence is an error"
        yield NCCLSetting("NCCL_NET", "AWS Libfabric", f"{reason}, where NCCL would take TCP")


# What was examined and found, as text for people and as JSON for programs.


def as_dict(examination: Examination, findings: Sequence[EnvironmentFinding]) -> dict[str, Any]:
    """Findings, the settings proposed, and every fact they rest on."""
    return {
        "findings": [finding.to_dict() for finding in findings],
        "settings": {
            host.name: [asdict(setting) for setting in settings_for(host)]
            for host in examination.hosts
        },
        "examination": asdict(examination),
    }


def as_lines(examination: Examination, findings: Sequence[EnvironmentFinding]) -> Iterator[str]:
    """The hosts, the ways between them, then what is wrong, the worst first."""
    width = max((len(host.name) for host in examination.hosts), default=0)
    for host in examination.hosts:
        yield f"{host.name:<{width}}  {_host(host)}"
        yield f"{'':<{width}}  {_network(host)}"
    if examination.links:
        yield _links(examination.links)
    yield ""
    for number, finding in enumerate(findings, start=1):
        yield from _finding(number, finding)
    yield _verdict(findings)
    yield from _settings(examination)


def _host(host: HostFacts) -> str:
    devices = f"{len(host.devices)} × {host.devices[0].name}" if host.devices else "no GPU"
    torch = host.versions.get("torch", "none")
    memory = readable_bytes(host.memory_limit_bytes or host.memory_bytes or 0)
    shm = readable_bytes(host.shm_total_bytes or 0)
    return (
        f"torch {torch}, Python {host.versions['python']}, {devices}, {host.num_cores} cores,"
        f" {memory}, /dev/shm {shm}"
    )


def _network(host: HostFacts) -> str:
    address = collective_address(host.variables, host.own_addresses, host.interfaces)
    names = {interface.address: interface.name for interface in host.interfaces}
    gloo = f"{names.get(str(address), 'no interface')} ({address})" if address else "nothing"
    nccl = nccl_interface(host.variables, host.interfaces)
    return f"{fabric_of(host)}; gloo will use {gloo}, NCCL's bootstrap {nccl or 'nothing'}"


def _links(links: Sequence[HostLink]) -> str:
    rates = [link.bytes_per_s for link in links if link.bytes_per_s is not None]
    delays = [link.latency_s for link in links if link.latency_s is not None]
    if not rates or not delays:
        return f"{len(links)} ways between hosts: none of them works"
    return (
        f"{len(rates)} of {len(links)} ways between hosts work: one stream carries"
        f" {min(rates) * 8e-9:.2f}–{max(rates) * 8e-9:.2f} Gbit/s,"
        f" {median(delays) * 1e6:.0f} µs one way"
    )


def _finding(number: int, finding: EnvironmentFinding) -> Iterator[str]:
    hosts = ", ".join(finding.hosts) or "the run"
    yield f"{number}. {finding.severity}: {hosts}: {finding.what}"
    yield f"   seen: {finding.evidence}"
    yield f"   fix:  {finding.fix}"


def _verdict(findings: Sequence[EnvironmentFinding]) -> str:
    errors = sum(finding.severity == "error" for finding in findings)
    if not findings:
        return "nothing found that stands in a run's way"
    return f"{errors} error{'s' * (errors != 1)}, {len(findings) - errors} to think about"


def _settings(examination: Examination) -> Iterator[str]:
    """Only where NCCL will be used, or where there is more than Ethernet."""
    shown = [host for host in examination.hosts if host.devices or host.adapters]
    if not shown or (len(examination.hosts) < 2 and not shown[0].adapters):
        return
    groups: dict[tuple[tuple[str, str, str], ...], list[str]] = {}
    for host in shown:
        key = tuple((s.name, s.value, s.reason) for s in settings_for(host))
        groups.setdefault(key, []).append(host.name)
    for settings, names in groups.items():
        yield ""
        yield f"settings for {', '.join(names)} (from NCCL's documents; not tried on hardware):"
        for name, value, reason in settings:
            yield f"  export {name}={shlex.quote(value)}"
            yield f"      # {reason}"


def paste_lines(host: HostFacts) -> Iterator[str]:
    """In the order a reader asks: which software, which machine, which network, which settings."""
    yield "### Drivetrain environment"
    yield "```"
    for name, version in host.versions.items():
        yield f"{name + ':':<18}{version}"
    yield f"{'cores:':<18}{host.num_cores}"
    memory = readable_bytes(host.memory_bytes or 0)
    limit = f" (limit {readable_bytes(host.memory_limit_bytes)})" if host.memory_limit_bytes else ""
    yield f"{'memory:':<18}{memory}{limit}"
    yield f"{SHM + ':':<18}{readable_bytes(host.shm_total_bytes or 0)}"
    yield f"{'open files:':<18}{host.limits.open_files or 'unlimited'}"
    yield f"{'GPUs:':<18}{_devices(host)}"
    for adapter in host.adapters:
        yield f"{'adapter:':<18}{adapter.name} {adapter.kind} {adapter.rate}"
    for interface in host.interfaces:
        yield f"{'interface:':<18}{interface.name} {interface.address} mtu {interface.mtu}"
    yield f"{'own name:':<18}{host.name} → {', '.join(host.own_addresses) or 'no address'}"
    for name, value in host.variables.items():
        yield f"{name}={value}"
    yield "```"


def _devices(host: HostFacts) -> str:
    if not host.devices:
        return "none"
    first = host.devices[0]
    return f"{len(host.devices)} × {first.name}, {first.memory_mib} MiB, driver {first.driver}"
