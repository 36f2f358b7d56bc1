"""What was examined and found, as text for people and as JSON for programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from drivetrain.core.finding import Finding
from drivetrain.core.text import readable_bytes
from drivetrain.doctor.fabric import fabric_of, settings_for
from drivetrain.doctor.facts import Examination, HostFacts, Link
from drivetrain.doctor.hardware import SHM
from drivetrain.doctor.network import collective_address, nccl_interface


def as_dict(examination: Examination, findings: Sequence[Finding]) -> dict[str, Any]:
    """Findings, the settings proposed, and every fact they rest on."""
    return {
        "findings": [finding.to_dict() for finding in findings],
        "settings": {
            host.name: [asdict(setting) for setting in settings_for(host)]
            for host in examination.hosts
        },
        "examination": asdict(examination),
    }


def as_lines(examination: Examination, findings: Sequence[Finding]) -> Iterator[str]:
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


def _links(links: Sequence[Link]) -> str:
    rates = [link.bytes_per_s for link in links if link.bytes_per_s is not None]
    delays = [link.latency_s for link in links if link.latency_s is not None]
    if not rates or not delays:
        return f"{len(links)} ways between hosts: none of them works"
    return (
        f"{len(rates)} of {len(links)} ways between hosts work: one stream carries"
        f" {min(rates) * 8e-9:.2f}–{max(rates) * 8e-9:.2f} Gbit/s,"
        f" {median(delays) * 1e6:.0f} µs one way"
    )


def _finding(number: int, finding: Finding) -> Iterator[str]:
    hosts = ", ".join(finding.hosts) or "the run"
    yield f"{number}. {finding.severity}: {hosts}: {finding.what}"
    yield f"   seen: {finding.evidence}"
    yield f"   fix:  {finding.fix}"


def _verdict(findings: Sequence[Finding]) -> str:
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
            yield f"  export {name}={value}"
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
