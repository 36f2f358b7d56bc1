"""From attempts, step tables and events to a ledger."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from drivetrain.record.ledger.binning import Records, binned, move_evaluations, named
from drivetrain.record.ledger.values import Ledger, Segment
from drivetrain.record.reading.attempts import PastAttempt
from drivetrain.record.reading.events import Event
from drivetrain.record.reading.run import RunReading
from drivetrain.record.reading.steps import Table, is_redone

_AFTER_LAST_STEP = {
    "finished": "start_up",
    "stalled": "stalled",
    "preempted": "preempted",
    "running": "productive",
}
"""What the time from the last step to an attempt's end was; otherwise it was a step cut short."""


@dataclass(frozen=True)
class _Life:
    """One attempt, between points in time that meet its neighbours'."""

    attempt: PastAttempt
    begin_s: float
    end_s: float
    kind: str
    is_restart: bool
    """Whether the supervisor started it, after an attempt that went wrong."""


def ledger_of(run: RunReading, num_ranks: int = 64, num_bins: int = 48) -> Ledger:
    """A run's ledger, from so many ranks evenly spread over it, in so many stretches an attempt."""
    every = max(1, -(-len(run.ranks) // num_ranks))
    events = run.events(run.ranks[0]) if run.ranks else []
    return make_ledger(run.attempts(), run.tables(run.ranks[::every]), events, num_bins)


def make_ledger(
    attempts: Sequence[PastAttempt],
    tables: Iterable[tuple[int, Table]],
    events: Sequence[Event],
    num_bins: int = 48,
) -> Ledger:
    """From what was written down."""
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
    for index, life in enumerate(lives):
        if index:
            segments += _gap(lives[index - 1], life)
        own_records = _within(life, records[life.attempt.number])
        segments += _segments(life, own_records, events, num_bins)
    if not lives:
        return Ledger(0.0, 0.0, (), num_ranks)
    return Ledger(lives[0].begin_s, lives[-1].end_s, tuple(segments), num_ranks)


def _lives(
    attempts: Sequence[PastAttempt],
    records: Mapping[int, Sequence[Records]],
    events: Sequence[Event],
) -> list[_Life]:
    """From when to when each attempt lasted, none overlapping the next."""
    lives: list[_Life] = []
    for index, attempt in enumerate(attempts):
        is_last = index == len(attempts) - 1
        until_s = float("inf") if is_last else attempts[index + 1].launched_s
        # a command that was running when the attempt before ended has started this one, too
        is_restart = bool(lives) and attempt.command_s < lives[-1].end_s
        begin_s = attempt.launched_s if is_restart else attempt.command_s
        if lives:  # two commands at once, or two hosts' clocks: no second is counted twice
            begin_s = max(begin_s, lives[-1].end_s)
        own = [e for e in events if attempt.launched_s <= e.time_s < until_s]
        signs_s = [each.last_s for each in records[attempt.number]] + [e.end_s for e in own]
        said_s = [attempt.end_s or 0.0, attempt.closed_s or 0.0, attempt.started_s, begin_s]
        end_s = max([*said_s, *signs_s])
        kind = attempt.kind or _kind_from(own, is_last=is_last)
        end_s = max(begin_s, min(end_s, until_s))
        lives.append(_Life(attempt, begin_s, end_s, kind, is_restart))
    return lives


def _within(life: _Life, ranks: Sequence[Records]) -> list[Records]:
    """Steps that an attempt did while it was the run; another may have taken over before."""
    cut = (records.between(life.begin_s, life.end_s) for records in ranks)
    return [records for records in cut if len(records.table)]


def _kind_from(events: Sequence[Event], *, is_last: bool) -> str:
    """Without a supervisor's word: what the ranks said themselves, or that it goes on."""
    names = {event.name for event in events if event.kind == "instant"}
    if "run_end" in names:
        return "finished"
    if "run_failed" in names:
        return "failed"
    return "running" if is_last else "lost"


def _gap(before: _Life, after: _Life) -> list[Segment]:
    """Between two attempts."""
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
    """One attempt: its beginning, its steps, its end."""
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
    # between records lies next to nothing; or, with live replicas, a step that was tried again
    name = "recovery" if any(e.name == "live_step_again" for e in within) else "productive"
    start = Segment(life.begin_s, first_s, {opening: first_s - life.begin_s}, number)
    between = Segment(first_s, last_s, {name: missing_s}, number)
    return [start, *steps, between, _closing(life, last_s, within)]


def _closing(life: _Life, last_s: float, events: Sequence[Event]) -> Segment:
    """From the last step to the end of the attempt."""
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
    rest = _AFTER_LAST_STEP.get(life.kind, "redone")
    seconds[rest] = seconds.get(rest, 0.0) + left_s
    return Segment(last_s, life.end_s, seconds, life.attempt.number)
