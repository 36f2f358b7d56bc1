"""A study in a terminal: running trials, the best, and those that wait."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from drivetrain.core.errors import DrivetrainError
from drivetrain.launch import submission
from drivetrain.record.reading import open_run
from drivetrain.record.status import status_of
from drivetrain.tune import decide
from drivetrain.tune.journal import State, read_journal
from drivetrain.tune.rows import Row, best_first, on_front, rows_of
from drivetrain.tune.settings import Study
from drivetrain.tune.space import short_key
from drivetrain.view.series import number_text

_HEAD_LINES = 8
"""Lines above and below the table of ended trials."""


@dataclass(frozen=True)
class StudyNow:
    """A snapshot of a study's directory."""

    study: Study
    rows: list[Row]
    running: list[tuple[int, int, int | None, float | None]]
    """(trial, step, last step of the run if known, last loss)."""
    num_waiting: int
    """Trials that are ready but not started."""

    def frame(self, width: int, height: int, foot: str = "") -> RenderableType:
        """A screen of at most that size."""
        del width  # rich truncates lines itself
        ended = [row for row in self.rows if row.value is not None or row.reason]
        ended = best_first(self.study, ended)
        room = max(1, height - _HEAD_LINES - max(1, len(self.running)))
        parts: list[RenderableType] = [*self._head(), Text(""), self._running_table(), Text("")]
        names = [each.metric for each in self.study.settings.objectives]
        parts.append(_trials_table(ended[:room], names))
        if len(ended) > room:
            parts.append(Text(f"  and {len(ended) - room:,} more", style="dim"))
        if foot:
            parts.append(Text(f" {foot}", style="dim", no_wrap=True))
        return Group(*parts)

    def _head(self) -> Iterator[Text]:
        settings, states = self.study.settings, Counter(row.state for row in self.rows)
        yield Text.assemble(
            (self.study.path.absolute().name, "bold"),
            f"  {len(self.rows):,} of {settings.num_trials:,} trials  {settings.sampler}",
            f"  {settings.schedule}",
        )
        best = next((row for row in self.rows if row.is_best), None)
        if best is not None and settings.further:
            yield Text(on_front(self.study, self.rows))
        elif best is not None and best.value is not None:
            found = f"{settings.metric} {best.value:.6g}"
            yield Text.assemble("best ", (found, "bold green"), f"  trial {best.trial}")
        else:
            yield Text("no result yet", style="dim")
        over = [f"{count:,} {name}" for name, count in sorted(states.items()) if name != "open"]
        to_come = settings.num_trials - len(self.rows)
        counts = [f"{len(self.running):,} running", f"{self.num_waiting:,} waiting to start", *over]
        yield Text(", ".join([*counts, f"{to_come:,} to come"]))

    def _running_table(self) -> RenderableType:
        if not self.running:
            return Text("nothing is running", style="dim")
        table = _table("running", "step", ["loss"], "values")
        for trial, step, last, loss in self.running:
            of = f"/{last:,}" if last else ""
            shown = "" if loss is None else number_text(loss)
            table.add_row(str(trial), f"{step:,}{of}", shown, _values(self.rows[trial]))
        return table


def look(study: Study) -> StudyNow:
    """Read the journal and the running trials."""
    state = read_journal(study.path)
    running, waiting = [], 0
    for work in decide.ready(study.settings, state):
        made = submission.find(study.run_dir(work.trial))
        if made is None or made.status().state.is_over:
            waiting += 1
        else:
            running.append(_running(study, work.trial, state))
    return StudyNow(study, rows_of(study), running, waiting)


def _running(study: Study, trial: int, state: State) -> tuple[int, int, int | None, float | None]:
    last = state.last(trial)
    try:
        found = status_of(open_run(study.run_dir(trial)), time.time())
    except DrivetrainError:  # it has no run directory yet
        return trial, 0 if last is None else last.step, None, None
    return trial, found.step, found.max_steps, found.loss


def _trials_table(rows: list[Row], metrics: list[str]) -> RenderableType:
    if not rows:
        return Text("no trial has a result", style="dim")
    table = _table("trial", "step", metrics, "values", "state")
    for row in rows:
        shown = [f"{row.objectives[n]:.6g}" if n in row.objectives else "" for n in metrics]
        style = "bold green" if row.is_best else ""
        table.add_row(str(row.trial), f"{row.step:,}", *shown, row.state, _values(row), style=style)
    return table


def _table(first: str, step: str, results: list[str], values: str, *more: str) -> Table:
    table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 2, 0, 0))
    for name in (first, step, *results):  # only the values column may shrink
        table.add_column(name, justify="right", no_wrap=True, min_width=max(9, len(name)))
    for name in more:
        table.add_column(name, no_wrap=True, min_width=10)
    table.add_column(values, no_wrap=True, overflow="ellipsis")
    return table


def _values(row: Row) -> str:
    words = (
        f"{short_key(key)}={number_text(value) if isinstance(value, float) else value}"
        for key, value in row.values.items()
    )
    return " ".join(words)
