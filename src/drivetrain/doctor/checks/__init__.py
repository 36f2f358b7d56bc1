"""Each check is a pure judgement: an Examination in, findings out. They are listed here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from drivetrain.core.finding import Finding
from drivetrain.doctor.checks import (
    clocks,
    devices,
    links,
    names,
    ports,
    resources,
    scheduler,
    storage,
    timeouts,
    versions,
)
from drivetrain.doctor.facts import Examination

CHECKS: Sequence[Callable[[Examination], Iterator[Finding]]] = (
    versions.check,
    devices.check,
    names.check,
    links.check,
    ports.check,
    clocks.check,
    resources.check,
    storage.check,
    timeouts.check,
    scheduler.check,
)


def judge(examination: Examination) -> list[Finding]:
    """Every finding of every check."""
    return [finding for check in CHECKS for finding in check(examination)]
