"""Ports the run wants and somebody else has."""

from __future__ import annotations

from collections.abc import Iterator

from drivetrain.core.finding import Finding
from drivetrain.doctor.facts import Examination, PortUse
from drivetrain.doctor.network import age_text


def check(examination: Examination) -> Iterator[Finding]:
    """Usually what an earlier run has left behind."""
    for host in examination.hosts:
        for use in host.ports:
            if not use.is_free:
                yield Finding(
                    "ports",
                    "error",
                    (host.name,),
                    f"port {use.port} is held by another process",
                    _holder(use),
                    _fix(host.name, use),
                )


def _holder(use: PortUse) -> str:
    if use.pid is None:
        return "who holds it cannot be seen by this user"
    orphan = ", whoever started it is gone" if use.is_orphan else ""
    return f"pid {use.pid}, {age_text(use.age_s)}{orphan}: {use.command}"


def _fix(host: str, use: PortUse) -> str:
    if use.pid is None:
        return f"sudo ss -ltnp 'sport = :{use.port}' on {host}; end it, or use another port"
    return f"if it is left over from an earlier run: kill {use.pid} on {host}; or use another port"
