"""The list of checks. Each is a pure function from an Examination to findings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from drivetrain.core.finding import EnvironmentFinding
from drivetrain.doctor.checks import machine, network, settings
from drivetrain.doctor.facts import Examination

CHECKS: Sequence[Callable[[Examination], Iterator[EnvironmentFinding]]] = (
    settings.check_versions,
    machine.check_devices,
    network.check_names,
    network.check_links,
    network.check_ports,
    machine.check_clocks,
    machine.check_resources,
    machine.check_storage,
    settings.check_timeouts,
    settings.check_scheduler,
)


def judge(examination: Examination) -> list[EnvironmentFinding]:
    """Return the findings of all checks."""
    return [finding for check in CHECKS for finding in check(examination)]
