"""Logbook and GridBuilder: collect a run's data incrementally while it runs."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drivetrain.record.expert_load import EVENT, LoadRecord, load_records
from drivetrain.record.reading import Event
from drivetrain.view.run_view import CheckpointView, EventView, RankGrid, Table
from drivetrain.view.series import ChartSeries, duration_text, make_series, number_text

# Logbook: rank 0's events, collected incrementally while the run is live.

_KEPT_LINES = 200
_SELDOM = ("evaluation", "evaluate", "compile")
"""Spans that get a line in the log."""
_ENDINGS = {"run_end": "finished", "run_failed": "failed"}


class Logbook:
    """Collects events; provides curves, checkpoints and the last log lines."""

    def __init__(self) -> None:
        self.checkpoints: list[CheckpointView] = []
        self.expert_load: LoadRecord | None = None
        """The latest load record of a model with experts."""
        self.last_s = 0.0
        self.ending = ""
        """How the last attempt reported its end, for runs without a supervisor."""
        self._points: dict[str, tuple[list[int], list[float]]] = {}
        self._lines: deque[EventView] = deque(maxlen=_KEPT_LINES)
        self._attempt = 1
        self._drawn: dict[str, ChartSeries] = {}

    def take(self, events: Iterable[Event]) -> None:
        """Add the next events, in order."""
        for event in events:
            self.last_s = max(self.last_s, event.end_s)
            if event.kind == "scalars":
                self._take_scalars(event)
            else:
                self._take_happening(event)

    @property
    def lines(self) -> tuple[EventView, ...]:
        """The last log lines, the newest at the end."""
        return tuple(self._lines)

    def series(self) -> dict[str, ChartSeries]:
        """Return every scalar; unchanged ones are the same objects as before."""
        for name, (steps, values) in self._points.items():
            if name not in self._drawn:
                self._drawn[name] = make_series(name, steps, values)
        return dict(self._drawn)

    def _take_scalars(self, event: Event) -> None:
        for name, value in event.values.items():
            steps, values = self._points.setdefault(name, ([], []))
            steps.append(event.step)
            values.append(float(value))
            self._drawn.pop(name, None)
            if name.startswith("val/") or not math.isfinite(value):
                self._say(event.time_s, f"step {event.step}: {name} {number_text(float(value))}")

    def _take_happening(self, event: Event) -> None:
        if event.kind == "instant" and event.name == EVENT:
            self.expert_load = next(iter(load_records([event])), self.expert_load)
            return
        if event.kind == "instant":
            self.ending = _ENDINGS.get(event.name, "")
        match event.kind, event.name:
            case "instant", "attempt":
                self._attempt = int(event.values.get("number") or self._attempt)
                after = int(event.values.get("resumed_step") or 0)
                begun = f"resumes after step {after}" if after else "begins"
                self._say(event.time_s, f"attempt {self._attempt} {begun}")
            case "instant", "saved":
                blocked_s = float(event.values.get("blocked_s") or 0.0)
                beside_s = float(event.values.get("beside_s") or 0.0)
                written = event.values.get("written_bytes")
                save = CheckpointView(
                    event.step,
                    self._attempt,
                    event.time_s,
                    blocked_s,
                    beside_s,
                    None if written is None else float(written),
                    float(event.values.get("referred_bytes") or 0.0),
                )
                self.checkpoints.append(save)
                held = duration_text(blocked_s)
                self._say(event.time_s, f"step {event.step}: saved; training waited {held}")
            case "instant", name:
                fields = ", ".join(f"{key} {value}" for key, value in event.values.items())
                self._say(
                    event.time_s, f"{name.replace('_', ' ')}" + (f": {fields}" if fields else "")
                )
            case "span", name if name in _SELDOM:
                took = duration_text(event.duration_s)
                self._say(event.end_s, f"step {event.step}: {name} took {took}")

    def _say(self, time_s: float, what: str) -> None:
        self._lines.append(EventView(time_s, what))


# GridBuilder: turns every rank's steps into a grid that fits on a page, in one pass.
#
# Each rank has the same few columns. When the steps outgrow them, pairs of columns are merged and
# half of them become free: memory does not grow with the steps, and no step is read twice.

PARTS = {
    "compute": "compute_s",
    "data_wait": "data_wait_s",
    "communication": "communication_s",
}
"""The parts of a step that are shown, and their fields in a step's record."""
_MOST_COLUMNS = 96
_MOST_ROWS = 64


class GridBuilder:
    """Accumulates seconds and step counts by rank and column."""

    def __init__(self, ranks: Sequence[int], most_columns: int = _MOST_COLUMNS) -> None:
        self._ranks = tuple(ranks)
        self._width = 1
        shape = (len(self._ranks), most_columns)
        self._sums = {part: np.zeros(shape) for part in PARTS}
        self._counts = np.zeros(shape)
        self._last_step = 0

    def take(self, row: int, table: NDArray[Any]) -> None:
        """Add records of the rank in that row."""
        if not len(table):
            return
        steps = table["step"].astype(np.int64)
        self._last_step = max(self._last_step, int(steps.max()))
        num_columns = self._counts.shape[1]
        while (self._last_step - 1) // self._width >= num_columns:
            self._halve()
        column = np.maximum(steps - 1, 0) // self._width
        self._counts[row] += np.bincount(column, minlength=num_columns)
        for part, field in PARTS.items():
            self._sums[part][row] += np.bincount(column, table[field], num_columns)

    def grid(self, most_rows: int = _MOST_ROWS) -> RankGrid | None:
        """Return the grid so far; None without a step."""
        if not self._last_step or not self._ranks:
            return None
        num_columns = -(-self._last_step // self._width)
        per_row = -(-len(self._ranks) // most_rows)
        starts = np.arange(0, len(self._ranks), per_row)
        with np.errstate(invalid="ignore", divide="ignore"):
            seconds = {
                part: _slowest((sums / self._counts)[:, :num_columns], starts)
                for part, sums in self._sums.items()
            }
        step_edges = [1 + column * self._width for column in range(num_columns)]
        return RankGrid(
            rank_edges=[self._ranks[start] for start in starts.tolist()] + [self._ranks[-1] + 1],
            step_edges=[*step_edges, self._last_step + 1],
            seconds=seconds,
        )

    def _halve(self) -> None:
        self._width *= 2
        self._counts = _paired(self._counts)
        self._sums = {part: _paired(sums) for part, sums in self._sums.items()}


def _paired(table: NDArray[np.float64]) -> NDArray[np.float64]:
    paired = table[:, 0::2] + table[:, 1::2]
    return np.hstack([paired, np.zeros_like(paired)])


def _slowest(means: NDArray[np.float64], starts: NDArray[np.int64]) -> Table:
    # fmax ignores NaN: a rank without steps does not hide its neighbours
    return np.asarray(np.fmax.reduceat(means, starts, axis=0), dtype=np.float32)
