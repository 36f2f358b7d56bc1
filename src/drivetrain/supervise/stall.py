"""StallWatch: when is a rank that says nothing no longer just slow?

The time-out is learned from the run's own steps: ten times the slowest of the recent ones, never
less than a floor. Starting, saving and evaluating take as long as they take, up to a longer limit.
Pure: time comes in as a number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from drivetrain.record.session import Phase, Progress

_RECENT = 100
_TIMES_SLOWEST = 10.0


@dataclass(frozen=True)
class Patience:
    """Seconds without progress that are still normal."""

    stepping_s: float = 60.0
    """At least; learned upwards."""
    otherwise_s: float = 900.0
    """While starting (and compiling), saving, evaluating."""


@dataclass(frozen=True)
class Stall:
    """A rank that has made no progress for too long."""

    local_rank: int
    progress: Progress
    silent_s: float
    allowed_s: float

    def __str__(self) -> str:
        doing = self.progress.phase.name.lower()
        return (
            f"no progress for {self.silent_s:.1f} s after step {self.progress.step} ({doing}; "
            f"{self.allowed_s:.1f} s are allowed)"
        )


@dataclass
class StallWatch:
    """Watches one node's ranks through one attempt."""

    patience: Patience
    leniency: float = 1.0
    """Doubled after each stall, so that something rare and slow gets through the second time."""
    _last: dict[int, Progress] = field(default_factory=dict)
    _steps_s: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    _at_most_s: float | None = None
    """Of a rank whose first steps came between two looks: with the rest of its start in it."""

    def observe(self, pages: Sequence[Progress | None], now_s: float) -> Stall | None:
        """The rank that has been silent for too long, relative to what it is allowed, if any."""
        stalls = []
        for rank, page in enumerate(pages):
            if page is None or page.phase is Phase.ENDED:
                continue
            self._learn(rank, page)
            allowed_s = self.allowed_s(page.phase)
            silent_s = now_s - page.at_s
            if silent_s > allowed_s:
                stalls.append(Stall(rank, page, silent_s, allowed_s))
        return min(stalls, key=lambda stall: stall.progress.step, default=None)

    def allowed_s(self, phase: Phase) -> float:
        """How long a rank may be silent now."""
        slowest_s = max(self._steps_s, default=self._at_most_s)
        if phase is not Phase.STEPPING or slowest_s is None:  # how long a step takes is not known
            return self.patience.otherwise_s * self.leniency
        return max(self.patience.stepping_s, _TIMES_SLOWEST * slowest_s) * self.leniency

    def _learn(self, rank: int, page: Progress) -> None:
        before = self._last.get(rank)
        self._last[rank] = page
        if before is None or page.phase is not Phase.STEPPING:
            return
        num_steps = page.step - before.step
        if before.phase is Phase.STEPPING and num_steps > 0:
            self._steps_s.append((page.at_s - before.at_s) / num_steps)
        elif before.phase is Phase.STARTING and num_steps > 1:
            self._at_most_s = (page.at_s - before.at_s) / num_steps
