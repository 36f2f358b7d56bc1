"""A study as rows, one a trial: what is listed, shown and exported. From its directory alone."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from drivetrain.tune import decide
from drivetrain.tune.journal import Fork, State, read_journal
from drivetrain.tune.settings import Study
from drivetrain.tune.space import Scalar


@dataclass(frozen=True)
class Row:
    """One trial."""

    trial: int
    state: str
    """open, paused, left (at a rung), done, not finite, failed."""
    rung: int | None
    step: int
    value: float | None
    values: Mapping[str, Scalar]
    reason: str
    is_best: bool
    run_dir: str
    fork: Fork | None
    """Of a population: whose checkpoint it begins with; none of those at the roots."""


def rows_of(study: Study, state: State | None = None) -> list[Row]:
    """Every trial that was asked for."""
    state = read_journal(study.path) if state is None else state
    best = decide.winner(study.settings, state)
    number = None if best is None else best.trial
    return [_row(study, state, trial, number) for trial in range(len(state.asked))]


def _row(study: Study, state: State, trial: int, best: int | None) -> Row:
    last = state.last(trial)
    return Row(
        trial=trial,
        state=_state(study, state, trial),
        rung=None if last is None else last.rung,
        step=0 if last is None else last.step,
        value=None if last is None else last.value,
        values=state.asked[trial].values,
        reason="" if last is None else last.reason,
        is_best=trial == best,
        run_dir=str(study.run_dir(trial)),
        fork=state.asked[trial].fork,
    )


def _state(study: Study, state: State, trial: int) -> str:
    last = state.last(trial)
    if last is None:
        return "open"
    if last.outcome != "done":
        return last.outcome.replace("_", " ")
    if last.rung == study.settings.num_rungs - 1:
        return "done"
    return "left" if decide.is_over(study.settings, state, trial) else "paused"


def as_json(rows: list[Row]) -> str:
    """One object a trial."""
    return json.dumps([asdict(row) for row in rows], indent=2) + "\n"


def as_csv(rows: list[Row]) -> str:
    """A column for every parameter."""
    keys = list(dict.fromkeys(key for row in rows for key in row.values))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    has_forks = any(row.fork for row in rows)
    origin = ["donor", "forked_at"] if has_forks else []
    writer.writerow(["trial", "state", "rung", "step", "value", "is_best", *origin, *keys])
    for row in rows:
        facts: list[Any] = [row.trial, row.state, row.rung, row.step, row.value, row.is_best]
        if has_forks:
            facts += [row.fork.donor, row.fork.step] if row.fork else [None, None]
        writer.writerow([*facts, *(row.values.get(key) for key in keys)])
    return text.getvalue()
