"""The ledger's classes, and the account of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

CLASSES = (
    "productive",
    "evaluation",
    "data_wait",
    "communication",
    "checkpoint",
    "start_up",
    "compile",
    "recovery",
    "redone",
    "stalled",
    "preempted",
    "idle",
)


@dataclass(frozen=True)
class Segment:
    """A stretch of a run's time, for pictures."""

    start_s: float
    end_s: float
    seconds: Mapping[str, float]
    """By class; together, about the stretch's length."""
    attempt: int
    """0 between attempts."""


@dataclass(frozen=True)
class Ledger:
    """The account of one run."""

    start_s: float
    end_s: float
    segments: tuple[Segment, ...]
    num_ranks: int
    """How many the means are over; of a large run, a sample."""

    @property
    def wall_s(self) -> float:
        """From the first command to the last sign of life."""
        return self.end_s - self.start_s

    @property
    def seconds(self) -> dict[str, float]:
        """By class, in their order."""
        return {
            name: sum(segment.seconds.get(name, 0.0) for segment in self.segments)
            for name in CLASSES
        }

    def share(self, name: str) -> float:
        """A class's part of the wall clock."""
        return self.seconds[name] / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def goodput(self) -> float:
        """The productive part."""
        return self.share("productive")

    @property
    def unaccounted_s(self) -> float:
        """What the classes do not add up to: 0, but for rounding."""
        return self.wall_s - sum(self.seconds.values())


LABELS = {
    "productive": "productive",
    "evaluation": "evaluation",
    "data_wait": "data wait",
    "communication": "communication",
    "checkpoint": "checkpoint",
    "start_up": "start-up, shut-down",
    "compile": "compile",
    "recovery": "recovery",
    "redone": "redone work",
    "stalled": "stalled",
    "preempted": "preempted",
    "idle": "idle",
}
# Told apart by people who see colours differently, too (after Okabe and Ito).
COLOURS = {
    "productive": "#009e73",
    "evaluation": "#56b4e9",
    "data_wait": "#e69f00",
    "communication": "#0072b2",
    "checkpoint": "#cc79a7",
    "start_up": "#999999",
    "compile": "#b39ddb",
    "recovery": "#d55e00",
    "redone": "#f0e442",
    "stalled": "#a50026",
    "preempted": "#8c6d31",
    "idle": "#dddddd",
}
