"""Finding: one sentence about a problem, the evidence for it, and a remedy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any


class Severity(Enum):
    """How serious a finding is."""

    ERROR = "error"
    """It stopped the run or one of its attempts."""
    WARNING = "warning"
    """The run continues, but at a cost."""
    NOTE = "note"
    """Worth knowing."""


class Kind(Enum):
    """What kind of problem a finding describes."""

    HANG = "hang"
    MISMATCH = "mismatched_collectives"
    LEFT_EARLY = "left_early"
    CRASH = "crash"
    OUT_OF_MEMORY = "out_of_memory"
    FAILING_NODE = "failing_node"
    NON_FINITE = "non_finite"
    LOSS_SPIKE = "loss_spike"
    REPLICA_DRIFT = "replica_drift"
    SILENT_CORRUPTION = "silent_corruption"
    STRAGGLER = "straggler"
    DATA_BOUND = "data_bound"
    COMMUNICATION_BOUND = "communication_bound"
    CHECKPOINT_BOUND = "checkpoint_bound"
    LAUNCH_BOUND = "launch_bound"
    HOT_EXPERT = "hot_expert"
    OVERSUBSCRIBED = "oversubscribed_host"
    TIMES_UNKNOWN = "times_unknown"

    @property
    def label(self) -> str:
        """The kind in words."""
        return _LABELS.get(self.value, self.value.replace("_", " "))


_LABELS = {"non_finite": "non-finite loss"}


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong or costs time."""

    severity: Severity
    kind: Kind
    what: str
    """One sentence that names rank, host and line."""
    remedy: str
    evidence: tuple[str, ...] = ()
    """The observations behind the sentence, one per line."""
    ranks: tuple[int, ...] = ()
    """The ranks that caused it; empty if all of them did."""
    host: str = ""
    line: str = ""
    """`file.py:31 in function` in the user's code, where known."""
    attempt: int | None = None
    step: int | None = None
    recovered_by: int | None = None
    """The later attempt that got further, if one did."""

    @property
    def when(self) -> str:
        """`attempt 1, recovered by attempt 2`; empty if it is not about one attempt."""
        parts = [f"attempt {self.attempt}"] if self.attempt is not None else []
        if self.recovered_by is not None:
            parts.append(f"recovered by attempt {self.recovered_by}")
        return ", ".join(parts)

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "severity": self.severity.value, "kind": self.kind.value}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Finding:
        plain = dict(document)
        plain["severity"] = Severity(plain["severity"])
        plain["kind"] = Kind(plain["kind"])
        plain["evidence"] = tuple(plain["evidence"])
        plain["ranks"] = tuple(plain["ranks"])
        return cls(**plain)

    def __str__(self) -> str:
        return f"{self.what}; {self.remedy}"


def by_severity(findings: Sequence[Finding]) -> list[Finding]:
    """Sort by severity, then the latest attempt first; otherwise keep the order."""
    order = list(Severity)
    return sorted(findings, key=lambda f: (order.index(f.severity), -(f.attempt or 0)))


def listed(ranks: Sequence[int], most: int = 6) -> str:
    """`rank 3`, `ranks 0, 1 and 5`, `ranks 0, 1, 2, 3, 4 and 9 more`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = [str(rank) for rank in ranks]
    if len(shown) > most:
        shown = [*shown[: most - 1], f"{len(ranks) - most + 1} more"]
    return f"ranks {', '.join(shown[:-1])} and {shown[-1]}"
