"""Finding: what a diagnosis says. One sentence, what it rests on, and what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any


class Severity(Enum):
    """How bad it is."""

    ERROR = "error"
    """It stopped the run, or an attempt of it."""
    WARNING = "warning"
    """The run goes on, and loses something by it."""
    NOTE = "note"
    """Worth knowing."""


class Kind(Enum):
    """What it is."""

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


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong or costs time."""

    severity: Severity
    kind: Kind
    what: str
    """One sentence: rank, host and line are in it."""
    remedy: str
    evidence: tuple[str, ...] = ()
    """What the sentence rests on, a line each."""
    ranks: tuple[int, ...] = ()
    """Whose doing it is; empty when it is everybody's."""
    host: str = ""
    line: str = ""
    """`file.py:31 in function`: the user's own code, where it could be told."""
    attempt: int | None = None
    step: int | None = None

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
    """The worst first; of equals the latest attempt first, otherwise as they came."""
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
