"""A study as rows, one per trial, for lists and exports; read from its directory alone."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from drivetrain.tune import decide, pareto
from drivetrain.tune.journal import Fork, State, read_journal
from drivetrain.tune.settings import Study
from drivetrain.tune.space import Scalar


@dataclass(frozen=True)
class Row:
    """One trial."""

    trial: int
    state: str
    """open, paused, left (at a rung), done, not finite, failed, too large."""
    rung: int | None
    step: int
    value: float | None
    objectives: Mapping[str, float]
    """Values by name; the first is `value`."""
    values: Mapping[str, Scalar]
    reason: str
    is_best: bool
    """Whether it is the best, or on the Pareto front."""
    run_dir: str
    fork: Fork | None
    """The donor's checkpoint it starts from; None unless it is a fork."""


def rows_of(study: Study, state: State | None = None) -> list[Row]:
    """One row per trial of the journal."""
    state = read_journal(study.path) if state is None else state
    best = {each.trial for each in decide.best(study.settings, state)}
    return [_row(study, state, trial, trial in best) for trial in range(len(state.asked))]


def best_first(study: Study, rows: Iterable[Row]) -> list[Row]:
    """Sort rows: trained furthest first, then best first; of several objectives: front first."""
    sign = 1 if study.settings.mode == "min" else -1
    has_front = bool(study.settings.further)

    def order(row: Row) -> tuple[int, bool, bool, float]:
        is_behind = has_front and not row.is_best
        return -(row.rung or 0), row.value is None, is_behind, sign * (row.value or 0.0)

    return sorted(rows, key=order)


def on_front(study: Study, rows: Iterable[Row]) -> str:
    """Summary of the Pareto front: number of trials and range of each objective."""
    found = [row.objectives for row in rows if row.is_best]
    ranges = [
        f"{name} {min(each[name] for each in found):.4g} to {max(each[name] for each in found):.4g}"
        for name in (each.metric for each in study.settings.objectives)
    ]
    return f"{len(found):,} on the Pareto front: {', '.join(ranges)}"


def _row(study: Study, state: State, trial: int, is_best: bool) -> Row:
    last = state.last(trial)
    names = [each.metric for each in study.settings.objectives]
    found = () if last is None else pareto.values_of(study.settings, last)
    return Row(
        trial=trial,
        state=_state(study, state, trial),
        rung=None if last is None else last.rung,
        step=0 if last is None else last.step,
        value=None if last is None else last.value,
        objectives=dict(zip(names, found, strict=False)),
        values=state.asked[trial].values,
        reason="" if last is None else last.reason,
        is_best=is_best,
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
    """One object per trial."""
    return json.dumps([asdict(row) for row in rows], indent=2) + "\n"


def as_csv(rows: list[Row]) -> str:
    """One line per trial, one column per parameter."""
    keys = list(dict.fromkeys(key for row in rows for key in row.values))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    has_forks = any(row.fork for row in rows)
    origin = ["donor", "forked_at"] if has_forks else []
    names = list(dict.fromkeys(name for row in rows for name in row.objectives))
    several = names if len(names) > 1 else []
    first = ["trial", "state", "rung", "step", *(several or ["value"]), "is_best"]
    writer.writerow([*first, *origin, *keys])
    for row in rows:
        results = [row.objectives.get(name) for name in several] if several else [row.value]
        facts: list[Any] = [row.trial, row.state, row.rung, row.step, *results, row.is_best]
        if has_forks:
            facts += [row.fork.donor, row.fork.step] if row.fork else [None, None]
        writer.writerow([*facts, *(row.values.get(key) for key in keys)])
    return text.getvalue()
