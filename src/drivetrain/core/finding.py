"""EnvironmentFinding: what is wrong, the evidence, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Severity = Literal["error", "warning"]


@dataclass(frozen=True)
class EnvironmentFinding:
    """A problem of a host. An error stops a run; a warning costs time or safety."""

    check: str
    severity: Severity
    hosts: tuple[str, ...]
    what: str
    evidence: str
    fix: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def together(findings: Sequence[EnvironmentFinding]) -> list[EnvironmentFinding]:
    """Merge equal findings of several hosts into one that names them all; errors come first."""
    merged: dict[tuple[str, str, str, str], EnvironmentFinding] = {}
    for finding in findings:
        key = (finding.check, finding.what, finding.evidence, finding.fix)
        known = merged.get(key)
        hosts = (*known.hosts, *finding.hosts) if known else finding.hosts
        merged[key] = EnvironmentFinding(
            finding.check,
            finding.severity,
            tuple(dict.fromkeys(hosts)),
            finding.what,
            finding.evidence,
            finding.fix,
        )
    return sorted(merged.values(), key=lambda finding: finding.severity != "error")
