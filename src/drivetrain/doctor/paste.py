"""`drivetrain env`: one block of text to paste into a bug report, with nothing secret in it."""

from __future__ import annotations

from collections.abc import Iterator

from drivetrain.core.units import readable_bytes
from drivetrain.doctor.facts import HostFacts
from drivetrain.doctor.hardware import SHM


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
