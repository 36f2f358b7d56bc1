"""Follow a run: each look reads only what the run has written since the last one.

The ledger needs the complete step files of a few evenly spread ranks. To show which rank is slow
now, the last steps of all ranks are read, two kilobytes each. In an object store each of these is a
request, so the number of ranks is limited to what takes a second or two.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from drivetrain.record.ledger import Ledger, make_ledger
from drivetrain.record.reading import EventFollower, RunReading, StepFollower, duration_s
from drivetrain.record.reading.files import Event, Table
from drivetrain.view.builders import PARTS, Logbook
from drivetrain.view.describe import (
    describe_attempts,
    ledger_view,
    state_of,
    total_steps_of,
)
from drivetrain.view.run_view import RankMeans, RunView

RECENT_STEPS = 50
_LEDGER_RANKS = 8
_FAR_RANKS = 64


class RunFollower:
    """Builds views of a live run; remembers how far it has read."""

    def __init__(self, run: RunReading) -> None:
        self._run = run
        self._logbook = Logbook()
        self._events: list[Event] = []
        self._event_file: EventFollower | None = None
        self._sample: dict[int, _GrowingSteps] = {}

    def look(self, now_s: float) -> RunView:
        """Read what is new and return the run's current view."""
        run = self._run = RunReading(self._run.source)  # ranks and config may be new
        self._read_new(run)
        past = run.attempts()
        tables = [(rank, growing.table) for rank, growing in self._sample.items()]
        last_sign_s = max(
            [self._logbook.last_s, *(growing.end_s for growing in self._sample.values())]
        )
        step = max((int(t["step"].max()) for _, t in tables if len(t)), default=0)
        attempts = describe_attempts(past, last_sign_s, step, self._logbook.ending)
        ledger = make_ledger(past, tables, self._events) if past else Ledger(0.0, 0.0, (), 0)
        return RunView(
            name=run.name,
            state=state_of(past, attempts, last_sign_s, now_s),
            start_s=ledger.start_s or now_s,
            end_s=ledger.end_s or now_s,
            step=step,
            total_steps=total_steps_of(run),
            scalars=self._logbook.series(),
            attempts=attempts,
            checkpoints=self._logbook.checkpoints,
            ledger=ledger_view(ledger),
            recent=recent_means(run),
            events=self._logbook.lines,
            expert_load=self._logbook.expert_load,
        )

    def _read_new(self, run: RunReading) -> None:
        if not run.ranks:
            return
        if self._event_file is None:
            self._event_file = run.follow_events(run.ranks[0])
        new = self._event_file.read_new()
        self._events += new
        self._logbook.take(new)
        for rank in _spread_evenly(run.ranks, _LEDGER_RANKS):
            if rank not in self._sample:
                self._sample[rank] = _GrowingSteps(run.follow_steps(rank))
        for growing in self._sample.values():
            growing.read_new()


class _GrowingSteps:
    """A step file, and the records read from it so far."""

    def __init__(self, file: StepFollower) -> None:
        self._file = file
        self.table: Table = np.empty(0)

    def read_new(self) -> None:
        new = self._file.read_new()
        self.table = np.concatenate([self.table, new]) if len(self.table) else new

    @property
    def end_s(self) -> float:
        if not len(self.table):
            return 0.0
        return float(self.table["start_s"][-1]) + float(duration_s(self.table[-1:])[0])


def recent_means(run: RunReading, num_steps: int = RECENT_STEPS) -> RankMeans | None:
    """Return the mean parts of each rank's last steps."""
    if not run.ranks:
        return None
    is_far = "://" in run.address and not run.address.startswith("file://")
    ranks = _spread_evenly(run.ranks, _FAR_RANKS if is_far else len(run.ranks))
    seconds = {part: np.full(len(ranks), np.nan) for part in PARTS}
    step_s = np.full(len(ranks), np.nan)
    for row, rank in enumerate(ranks):
        table = run.last_steps(rank, num_steps)
        if len(table):
            step_s[row] = duration_s(table).mean()
            for part, field in PARTS.items():
                seconds[part][row] = table[field].mean()
    return RankMeans(ranks, len(run.ranks), seconds, step_s)


def _spread_evenly(ranks: Sequence[int], most: int) -> Sequence[int]:
    return ranks[:: max(1, -(-len(ranks) // most))]
