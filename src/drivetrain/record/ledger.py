"""Ledger: where every second of a run went, across all its attempts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from drivetrain.record.reading.files import Event, Table, is_redone
from drivetrain.record.reading.run import PastAttempt, RunReading
from drivetrain.record.step_file import COMPILES, SECONDS

# The ledger's classes, and the ledger itself.

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
    """A stretch of a run's time, for charts."""

    start_s: float
    end_s: float
    seconds: Mapping[str, float]
    """By class; they add up to about the stretch's length."""
    attempt: int
    """The attempt's number; 0 between attempts."""


@dataclass(frozen=True)
class Ledger:
    """Where the time of one run went."""

    start_s: float
    end_s: float
    segments: tuple[Segment, ...]
    num_ranks: int
    """Number of ranks that the means are taken over; a sample of a large run."""
    between_runs_s: float = 0.0
    """Seconds between a finished attempt and the next command, which no class accounts for."""

    @property
    def wall_s(self) -> float:
        """Seconds from the first command to the last heartbeat, except those between runs."""
        return self.end_s - self.start_s - self.between_runs_s

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by class, in the order of CLASSES."""
        return {
            name: sum(segment.seconds.get(name, 0.0) for segment in self.segments)
            for name in CLASSES
        }

    def share(self, name: str) -> float:
        """Return a class's share of the wall-clock time."""
        return self.seconds[name] / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def goodput(self) -> float:
        """The productive share of the wall-clock time."""
        return self.share("productive")

    @property
    def unaccounted_s(self) -> float:
        """Seconds that no class accounts for: 0, except for rounding."""
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
BETWEEN_RUNS = "between runs, not counted"
# Distinguishable with colour blindness, too (after Okabe and Ito).
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


# From attempts, step tables and events to a ledger.

_INDEX = {name: index for index, name in enumerate(CLASSES)}
_FIELD_CLASSES = {
    "data_wait_s": "data_wait",
    "communication_s": "communication",
    "checkpoint_s": "checkpoint",
}
"""The class of each field of a step; its other seconds are productive."""
_ROUNDING_S = 1e-6
"""Tolerance for sums that are added in a different order."""


@dataclass(frozen=True)
class Records:
    """One rank's step records in one attempt."""

    table: Table
    redone: NDArray[np.bool_]

    @property
    def first_s(self) -> float:
        """The start of the first step."""
        return float(self.table["start_s"][0])

    @property
    def last_s(self) -> float:
        """The end of the last step."""
        return float(self.table["start_s"][-1]) + sum(float(self.table[n][-1]) for n in SECONDS)

    def between(self, begin_s: float, end_s: float) -> Records:
        """Return the steps that began and ended between two times."""
        start_s = self.table["start_s"].astype(np.float64)
        took_s = np.sum([self.table[name] for name in SECONDS], axis=0, dtype=np.float64)
        is_in = (start_s >= begin_s - _ROUNDING_S) & (start_s + took_s <= end_s + _ROUNDING_S)
        return self if is_in.all() else Records(self.table[is_in], self.redone[is_in])

    def is_redone(self, step: int) -> bool:
        """Whether a later attempt repeated this step."""
        return bool(self.redone[self.table["step"] == step].any())


def binned(records: Records, edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return a rank's seconds by bin and class; a step counts in the bin it began in."""
    table, redone = records.table, records.redone
    num_bins = len(edges) - 1
    bins = np.clip(np.searchsorted(edges, table["start_s"], "right") - 1, 0, num_bins - 1)
    totals = np.zeros((num_bins, len(CLASSES)))
    compiling_s = _compiling(table)
    for name in SECONDS:
        seconds = table[name].astype(np.float64)
        if name == "compute_s":
            seconds -= compiling_s
        target = _INDEX[_FIELD_CLASSES.get(name, "productive")]
        totals[:, target] += np.bincount(bins, np.where(redone, 0.0, seconds), num_bins)
        totals[:, _INDEX["redone"]] += np.bincount(bins, np.where(redone, seconds, 0.0), num_bins)
    totals[:, _INDEX["compile"]] += np.bincount(bins, compiling_s, num_bins)
    return totals


def _compiling(table: Table) -> NDArray[np.float64]:
    """Return the extra compute time of steps in which torch.compile was active."""
    compiles = (table["flags"] & COMPILES) > 0
    compute_s = table["compute_s"].astype(np.float64)
    usual_s = float(np.median(compute_s[~compiles])) if (~compiles).any() else 0.0
    return np.where(compiles, np.maximum(compute_s - usual_s, 0.0), 0.0)


def move_evaluations(
    totals: NDArray[np.float64], edges: NDArray[np.float64], spans: Sequence[Event]
) -> None:
    """Move evaluations out of productive time: a step's record includes the one after it."""
    productive, evaluation = _INDEX["productive"], _INDEX["evaluation"]
    for span in spans:
        at = int(np.clip(np.searchsorted(edges, span.time_s, "right") - 1, 0, len(totals) - 1))
        # the step began in this bin or an earlier one
        for row in range(at, -1, -1):
            seconds = min(span.duration_s, totals[row, productive])
            totals[row, productive] -= seconds
            totals[row, evaluation] += seconds
            if seconds > 0:
                break


def named(row: NDArray[np.float64]) -> dict[str, float]:
    """Return a row as a mapping from class to seconds."""
    return {name: float(row[index]) for name, index in _INDEX.items() if row[index]}


_AFTER_LAST_STEP = {
    "finished": "start_up",
    "stalled": "stalled",
    "preempted": "preempted",
    "running": "productive",
}
"""The class of the time from the last step to an attempt's end; otherwise an unfinished step,
which counts as redone once a later attempt does it."""


@dataclass(frozen=True)
class _Life:
    """One attempt, between times that do not overlap its neighbours'."""

    attempt: PastAttempt
    begin_s: float
    end_s: float
    kind: str
    is_restart: bool
    """Whether the supervisor started it after a failed attempt."""
    is_last: bool


def ledger_of(run: RunReading, num_ranks: int = 64, num_bins: int = 48) -> Ledger:
    """Return a run's ledger, from evenly spread ranks, with `num_bins` stretches per attempt."""
    every = max(1, -(-len(run.ranks) // num_ranks))
    events = run.events(run.ranks[0]) if run.ranks else []
    return make_ledger(run.attempts(), run.tables(run.ranks[::every]), events, num_bins)


def make_ledger(
    attempts: Sequence[PastAttempt],
    tables: Iterable[tuple[int, Table]],
    events: Sequence[Event],
    num_bins: int = 48,
) -> Ledger:
    """Build a ledger from a run's records."""
    records: dict[int, list[Records]] = {attempt.number: [] for attempt in attempts}
    num_ranks = 0
    for _, table in tables:
        num_ranks += 1
        redone = is_redone(table)
        for number, of_attempt in records.items():
            own = table["attempt"] == number
            if own.any():
                of_attempt.append(Records(table[own], redone[own]))
    lives = _lives(attempts, records, events)
    segments: list[Segment] = []
    between_runs_s = 0.0
    for index, life in enumerate(lives):
        if index:
            before = lives[index - 1]
            if _is_extended(before, life):
                between_runs_s += life.begin_s - before.end_s
            else:
                segments += _gap(before, life)
        own_records = _within(life, records[life.attempt.number])
        segments += _segments(life, own_records, events, num_bins)
    if not lives:
        return Ledger(0.0, 0.0, (), num_ranks)
    begin_s, end_s = lives[0].begin_s, lives[-1].end_s
    return Ledger(begin_s, end_s, tuple(segments), num_ranks, between_runs_s)


def _lives(
    attempts: Sequence[PastAttempt],
    records: Mapping[int, Sequence[Records]],
    events: Sequence[Event],
) -> list[_Life]:
    """Return when each attempt began and ended, without overlaps."""
    lives: list[_Life] = []
    for index, attempt in enumerate(attempts):
        is_last = index == len(attempts) - 1
        until_s = float("inf") if is_last else attempts[index + 1].launched_s
        # if its command was already running when the previous attempt ended, this is a restart
        is_restart = bool(lives) and attempt.command_s < lives[-1].end_s
        begin_s = attempt.launched_s if is_restart else attempt.command_s
        if lives:  # concurrent commands or clock differences: count no second twice
            begin_s = max(begin_s, lives[-1].end_s)
        own = [e for e in events if attempt.launched_s <= e.time_s < until_s]
        signs_s = [each.last_s for each in records[attempt.number]] + [e.end_s for e in own]
        said_s = [attempt.end_s or 0.0, attempt.closed_s or 0.0, attempt.started_s, begin_s]
        end_s = max([*said_s, *signs_s])
        kind = attempt.kind or _kind_from(own, is_last=is_last)
        end_s = max(begin_s, min(end_s, until_s))
        lives.append(_Life(attempt, begin_s, end_s, kind, is_restart, is_last))
    return lives


def _within(life: _Life, ranks: Sequence[Records]) -> list[Records]:
    """Return the steps within an attempt's life; a later attempt may have taken over."""
    cut = (records.between(life.begin_s, life.end_s) for records in ranks)
    return [records for records in cut if len(records.table)]


def _kind_from(events: Sequence[Event], *, is_last: bool) -> str:
    """Without a supervisor's record, return what the ranks reported, or that it is running."""
    names = {event.name for event in events if event.kind == "instant"}
    if "run_end" in names:
        return "finished"
    if "run_failed" in names:
        return "failed"
    return "running" if is_last else "lost"


def _is_extended(before: _Life, after: _Life) -> bool:
    """Whether a finished run was started again: nothing waited in between, so no time was lost."""
    return before.kind == "finished" and not after.is_restart


def _gap(before: _Life, after: _Life) -> list[Segment]:
    """Return the time between two attempts, if any."""
    if after.begin_s <= before.end_s:
        return []
    if after.is_restart:
        name = "recovery"
    else:
        name = "preempted" if before.attempt.kind == "preempted" else "idle"
    seconds = {name: after.begin_s - before.end_s}
    return [Segment(before.end_s, after.begin_s, seconds, attempt=0)]


def _segments(
    life: _Life, ranks: Sequence[Records], events: Sequence[Event], num_bins: int
) -> list[Segment]:
    """Return one attempt's segments: its start, its steps and its end."""
    number = life.attempt.number
    opening = "recovery" if life.is_restart else "start_up"
    if not ranks:
        stalled_s = (
            min(life.attempt.started_s, life.end_s) if life.kind == "stalled" else life.end_s
        )
        return [
            Segment(start_s, end_s, {name: end_s - start_s}, number)
            for name, start_s, end_s in (
                (opening, life.begin_s, stalled_s),
                ("stalled", stalled_s, life.end_s),
            )
            if end_s > start_s
        ]
    first_s = float(np.mean([each.first_s for each in ranks]))
    last_s = float(np.mean([each.last_s for each in ranks]))
    within = [e for e in events if life.begin_s <= e.time_s <= life.end_s]
    evaluations = [
        e
        for e in within
        if e.kind == "span" and e.name == "evaluation" and not ranks[0].is_redone(e.step)
    ]
    edges = np.linspace(first_s, last_s, num_bins + 1)
    totals = np.mean([binned(each, edges) for each in ranks], axis=0)
    move_evaluations(totals, edges, [e for e in evaluations if e.time_s < last_s])
    steps = [
        Segment(float(edges[i]), float(edges[i + 1]), named(totals[i]), number)
        for i in range(num_bins)
    ]
    missing_s = last_s - first_s - float(totals.sum())
    # almost nothing lies between records, or with live replicas a step that was retried
    name = "recovery" if any(e.name == "live_step_again" for e in within) else "productive"
    start = Segment(life.begin_s, first_s, {opening: first_s - life.begin_s}, number)
    between = Segment(first_s, last_s, {name: missing_s}, number)
    return [start, *steps, between, _closing(life, last_s, within)]


def _closing(life: _Life, last_s: float, events: Sequence[Event]) -> Segment:
    """Return the segment from the last step to the end of the attempt."""
    left_s = life.end_s - last_s
    seconds: dict[str, float] = {}
    for span, name in (("evaluation", "evaluation"), ("last_save", "checkpoint")):
        took_s = sum(
            e.duration_s
            for e in events
            if e.name == span and e.kind == "span" and e.time_s >= last_s
        )
        seconds[name] = min(took_s, left_s)
        left_s -= seconds[name]
    rest = _AFTER_LAST_STEP.get(life.kind, "start_up" if life.is_last else "redone")
    seconds[rest] = seconds.get(rest, 0.0) + left_s
    return Segment(last_s, life.end_s, seconds, life.attempt.number)
