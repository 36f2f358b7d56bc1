"""A run's attempts, state, config and environment, from its small files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from drivetrain.config.keys import flatten
from drivetrain.diagnose.finding import Finding
from drivetrain.record.ledger import CLASSES, Ledger, make_ledger
from drivetrain.record.reading import PastAttempt, RunReading, duration_s
from drivetrain.record.reading.files import Table
from drivetrain.record.status import QUIET_S
from drivetrain.view.builders import GridBuilder, Logbook
from drivetrain.view.run_view import AttemptView, LedgerView, RunView
from drivetrain.view.summary import planned_and_measured

_HIDDEN_FACTS = ("started_s", "launched_s", "command_s", "resumed_step", "lost_starts")
_BINS = 120


def describe_attempts(
    attempts: Sequence[PastAttempt], last_sign_s: float, last_step: int, ending: str = ""
) -> list[AttemptView]:
    """Describe each attempt; its end is recorded, or else the next one's start or the last write.

    `ending` is how the last attempt itself reported its end, for runs without a supervisor.
    """
    shown = []
    for attempt, after in pairwise([*attempts, None]):
        if attempt is None:
            continue
        begun_s = attempt.launched_s
        limit_s = last_sign_s if after is None else after.launched_s
        end_s = attempt.end_s if attempt.end_s is not None else max(limit_s, begun_s)
        # if an attempt's end was not recorded, only its successor's first step is known
        step = attempt.last_step or (last_step if after is None else after.resumed_step)
        shown.append(
            AttemptView(
                number=attempt.number,
                start_s=begun_s,
                end_s=end_s,
                kind=attempt.kind or ("lost" if after is not None else ending or "running"),
                first_step=min(attempt.resumed_step + 1, max(step, 1)),
                last_step=step,
                num_ranks=attempt.world_size,
                host=attempt.host,
                what=attempt.reason,
                lost_starts=attempt.lost_starts,
            )
        )
    return shown


def state_of(
    past: Sequence[PastAttempt], shown: Sequence[AttemptView], last_sign_s: float, now_s: float
) -> str:
    """Return the state, named as in `drivetrain status`."""
    if not shown:
        return "starting"
    is_quiet = now_s - last_sign_s >= QUIET_S
    if past[-1].end.get("restarts"):
        return "quiet" if is_quiet else "restarting"
    return "quiet" if is_quiet and shown[-1].kind == "running" else shown[-1].kind


def facts_of(attempts: Sequence[PastAttempt]) -> dict[str, str]:
    """Return the facts recorded at the start of the last attempt."""
    if not attempts:
        return {}
    return {
        name.replace("_", " "): str(value)
        for name, value in attempts[-1].start.items()
        if name not in _HIDDEN_FACTS and value not in (None, "")
    }


def config_of(run: RunReading) -> dict[str, tuple[str, str]]:
    """Return dotted key → (value, source)."""
    sources: Mapping[str, Any] = run.sources
    return {
        key: (_said(value), str(sources.get(key, "default")))
        for key, value in flatten(run.config).items()
    }


def total_steps_of(run: RunReading) -> int | None:
    """Return the config's max_steps; None for a run that counts epochs."""
    steps = run.config.get("max_steps")
    return steps if isinstance(steps, int) else None


def ledger_view(ledger: Ledger, num_bins: int = _BINS) -> LedgerView | None:
    """Divide the ledger into equal bins from its start to its end."""
    if ledger.wall_s <= 0:
        return None
    edges_s = np.linspace(0.0, ledger.end_s - ledger.start_s, num_bins + 1)
    over_time = {name: np.zeros(num_bins) for name in CLASSES}
    for segment in ledger.segments:
        begin_s, end_s = segment.start_s - ledger.start_s, segment.end_s - ledger.start_s
        if end_s <= begin_s:
            continue
        inside_s = np.minimum(edges_s[1:], end_s) - np.maximum(edges_s[:-1], begin_s)
        share = np.maximum(inside_s, 0.0) / (end_s - begin_s)
        for name, seconds in segment.seconds.items():
            over_time[name] += share * seconds
    taken = {name: seconds for name, seconds in ledger.seconds.items() if seconds > 0}
    shown = {name: over_time[name] for name in taken}
    return LedgerView(taken, edges_s, shown, ledger.between_runs_s)


def _said(value: Any) -> str:
    """Format a value as in a config file, so that it can be copied from the page."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(map(_said, value))}]"
    return "" if value is None else str(value)


_LEDGER_RANKS = 64
"""The ledger is a mean over ranks; this many, evenly spread, are enough."""


def view_whole(run: RunReading, now_s: float, findings: list[Finding] | None = None) -> RunView:
    """Build the complete view in one pass over all ranks, with one rank in memory at a time."""
    ranks = run.ranks
    every = max(1, -(-len(ranks) // _LEDGER_RANKS))
    builder, sample = GridBuilder(ranks), []
    for row, (rank, table) in enumerate(run.tables()):
        builder.take(row, table)
        if row % every == 0:
            sample.append((rank, table))
    events = run.events(ranks[0]) if ranks else []
    logbook = Logbook()
    logbook.take(events)
    past = run.attempts()
    last_sign_s = max([logbook.last_s, *(_last_s(table) for _, table in sample)])
    step = max((int(table["step"].max()) for _, table in sample if len(table)), default=0)
    attempts = describe_attempts(past, last_sign_s, step, logbook.ending)
    ledger = make_ledger(past, sample, events)
    view = RunView(
        name=run.name,
        state=state_of(past, attempts, last_sign_s, now_s),
        start_s=ledger.start_s or min((a.start_s for a in attempts), default=now_s),
        end_s=ledger.end_s or last_sign_s or now_s,
        step=step,
        total_steps=total_steps_of(run),
        scalars=logbook.series(),
        attempts=attempts,
        checkpoints=logbook.checkpoints,
        ledger=ledger_view(ledger),
        ranks=builder.grid(),
        events=logbook.lines,
        expert_load=logbook.expert_load,
        facts=facts_of(past),
        config=config_of(run),
        findings=findings,
    )
    return planned_and_measured(view, run.document("plan.json"))


def _last_s(table: Table) -> float:
    if not len(table):
        return 0.0
    return float(table["start_s"][-1]) + float(duration_s(table[-1:])[0])
