"""The doctor's report and matching NCCL settings, as text and as JSON."""

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

# Settings for NCCL that match the detected network, each with its reason.
#
# They follow the documentation of NCCL, libfabric and the aws-ofi-nccl plug-in; none of them has
# been tested on such hardware.

Fabric = Literal["efa", "infiniband", "roce", "ethernet"]


@dataclass(frozen=True)
class NCCLSetting:
    """An environment variable to export before the run."""

    name: str
    value: str
    reason: str


def fabric_of(host: HostFacts) -> Fabric:
    """Return the host's fastest fabric; adapters that are down do not count."""
    kinds = {adapter.kind for adapter in host.adapters if adapter.is_up}
    order: tuple[Fabric, ...] = ("efa", "infiniband", "roce")
    return next((kind for kind in order if kind in kinds), "ethernet")


def settings_for(host: HostFacts) -> list[NCCLSetting]:
    """Return the variables to export for this host's fabric."""
    fabric = fabric_of(host)
    adapters = [each for each in host.adapters if each.kind == fabric and each.is_up]
    return [*_bootstrap(host), *_data_path(fabric, adapters, host)]


def _bootstrap(host: HostFacts) -> Iterator[NCCLSetting]:
    interface = suggested(host)
    if interface is not None:
        reason = "ranks find each other over it; otherwise a container bridge may be used"
        yield NCCLSetting("NCCL_SOCKET_IFNAME", f"={interface}", reason)
        yield NCCLSetting("GLOO_SOCKET_IFNAME", interface, "the same for gloo, without the `=`")


def _data_path(fabric: Fabric, adapters: list[Adapter], host: HostFacts) -> Iterator[NCCLSetting]:
    has_peer_memory = bool({"nvidia_peermem", "nv_peer_mem"} & set(host.modules))
    names = ",".join(adapter.name for adapter in adapters)
    if fabric == "ethernet":
        reason = "there is no InfiniBand: without this, NCCL searches for it and logs that"
        yield NCCLSetting("NCCL_IB_DISABLE", "1", reason)
        reason = "one thread does not saturate 25 Gbit/s or more; on slower links 1 is enough"
        yield NCCLSetting("NCCL_SOCKET_NTHREADS", "4", reason)
        reason = "several sockets per thread spread the load over a link's queues"
        yield NCCLSetting("NCCL_NSOCKS_PERTHREAD", "4", reason)
    if fabric in ("infiniband", "roce"):
        reason = "these are up; otherwise NCCL would also try ports that are down or for storage"
        yield NCCLSetting("NCCL_IB_HCA", f"={names}", reason)
    if fabric in ("infiniband", "roce") and not has_peer_memory:
        reason = "nvidia_peermem is not loaded, so the adapter cannot read GPU memory directly;"
        yield NCCLSetting(
            "NCCL_NET_GDR_LEVEL", "LOC", f"{reason} `modprobe nvidia_peermem` is better"
        )
    if fabric == "efa":
        yield NCCLSetting("FI_PROVIDER", "efa", "keeps libfabric from silently using TCP")
        reason = "aws-ofi-nccl carries NCCL over EFA; if it is named here, its absence is an error"
        yield NCCLSetting("NCCL_NET", "AWS Libfabric", f"{reason}, not a fallback to TCP")


# The report, as text for people and as JSON for programs.


def as_dict(examination: Examination, findings: Sequence[EnvironmentFinding]) -> dict[str, Any]:
    """Return the findings, the proposed settings, and all facts behind them."""
    return {
        "findings": [finding.to_dict() for finding in findings],
        "settings": {
            host.name: [asdict(setting) for setting in settings_for(host)]
            for host in examination.hosts
        },
        "examination": asdict(examination),
    }


def as_lines(examination: Examination, findings: Sequence[EnvironmentFinding]) -> Iterator[str]:
    """Yield the hosts, the links between them, then the findings in their order."""
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
        return f"{len(links)} links between hosts: none of them works"
    return (
        f"{len(rates)} of {len(links)} links between hosts work: one stream carries"
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
        return "no problems found"
    return f"{errors} error{'s' * (errors != 1)}, {len(findings) - errors} to review"


def _settings(examination: Examination) -> Iterator[str]:
    """Yield settings only where NCCL will be used, or where there is more than Ethernet."""
    shown = [host for host in examination.hosts if host.devices or host.adapters]
    if not shown or (len(examination.hosts) < 2 and not shown[0].adapters):
        return
    groups: dict[tuple[tuple[str, str, str], ...], list[str]] = {}
    for host in shown:
        key = tuple((s.name, s.value, s.reason) for s in settings_for(host))
        groups.setdefault(key, []).append(host.name)
    for settings, names in groups.items():
        yield ""
        yield f"settings for {', '.join(names)} (from NCCL's manual; not tested on hardware):"
        for name, value, reason in settings:
            yield f"  export {name}={shlex.quote(value)}"
            yield f"      # {reason}"


def paste_lines(host: HostFacts) -> Iterator[str]:
    """Yield one host's environment for pasting: software, machine, network, settings."""
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
