"""All of a run, read once from end to end: for the report and for comparing."""

from __future__ import annotations

from drivetrain.diagnose.finding import Finding
from drivetrain.record.ledger import make_ledger
from drivetrain.record.reading import RunReading, duration_s
from drivetrain.record.reading.steps import Table
from drivetrain.view.describe import (
    config_of,
    describe_attempts,
    facts_of,
    ledger_view,
    state_of,
    total_steps_of,
)
from drivetrain.view.logbook import Logbook
from drivetrain.view.planned import planned_and_measured
from drivetrain.view.rank_grid import GridBuilder
from drivetrain.view.run_view import RunView

_LEDGER_RANKS = 64
"""The ledger is a mean over ranks; so many, spread evenly, are as good as all."""


def view_whole(run: RunReading, now_s: float, findings: list[Finding] | None = None) -> RunView:
    """One pass over every rank's steps, one rank in memory at a time."""
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
        facts=facts_of(past),
        config=config_of(run),
        findings=findings,
    )
    return planned_and_measured(view, run.document("plan.json"))


def _last_s(table: Table) -> float:
    if not len(table):
        return 0.0
    return float(table["start_s"][-1]) + float(duration_s(table[-1:])[0])
