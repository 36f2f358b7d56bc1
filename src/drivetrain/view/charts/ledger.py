"""The ledger: one bar for all of the time, its table, and the same over time."""

from __future__ import annotations

from markupsafe import Markup

from drivetrain.view.charts.frame import SIZE, Frame, Tick, across, box, framed
from drivetrain.view.palette import css_of, words
from drivetrain.view.run_view import AttemptView, LedgerView, RunView
from drivetrain.view.scale import Scale, duration_text, duration_ticks


def ledger_bar(ledger: LedgerView) -> Markup:
    """One bar, as long as the run."""
    pieces, left = [], 0.0
    for name, seconds in ledger.seconds.items():
        share = ledger.share(name)
        if seconds > 0:
            said = f"{words(name)}: {duration_text(seconds)}, {share:.1%}"
            pieces.append(box(left, 0, share, 1, css_of(name), said))
        left += share
    return Markup(
        '<div class="ledger-bar" role="img" aria-label="where the time went"><svg '
        'viewBox="0 0 1000 1000" preserveAspectRatio="none" aria-hidden="true">{}</svg></div>'
    ).format(Markup("").join(pieces))


def ledger_table(ledger: LedgerView) -> Markup:
    """Every class that took time, the first as in the bar."""
    rows = [
        Markup(
            '<tr><td><i class="swatch {}"></i>{}</td><td class="number">{}</td>'
            '<td class="number">{}</td></tr>'
        ).format(css_of(name), words(name), duration_text(seconds), f"{ledger.share(name):.1%}")
        for name, seconds in ledger.seconds.items()
        if seconds > 0
    ]
    rows.append(
        Markup(
            '<tr class="total"><td>wall clock</td><td class="number">{}</td>'
            '<td class="number">100%</td></tr>'
        ).format(duration_text(ledger.wall_s))
    )
    return Markup('<table class="tight">{}</table>').format(Markup("").join(rows))


def ledger_over_time(ledger: LedgerView) -> Markup:
    """Columns of the wall clock, each filled by what its seconds went to."""
    scale = Scale(0.0, float(ledger.edges_s[-1]) or 1.0)
    left = scale.at(ledger.edges_s)
    columns = []
    for index in range(len(ledger.edges_s) - 1):
        width = float(left[index + 1] - left[index])
        total_s = sum(float(of[index]) for of in ledger.over_time.values())
        below = 1.0
        for name, of in ledger.over_time.items():
            share = float(of[index]) / total_s if total_s else 0.0
            if share > 0.002:
                said = f"{duration_text(float(ledger.edges_s[index]))}: {words(name)} {share:.0%}"
                # a hair wider than its bin, so that no seam of background shows between two
                columns.append(
                    box(float(left[index]), below - share, width * 1.04, share, css_of(name), said)
                )
            below -= share
    frame = Frame(
        "where the time went, over the run",
        [Tick(scale.place(at), duration_text(at)) for at in duration_ticks(scale, 5)],
        [Tick(at, f"{at:.0%}") for at in (0.0, 0.5, 1.0)],
        has_grid=False,
    )
    return framed(Markup("").join(columns), frame)


_GOOD = ("finished", "running", "starting")
_CALM = ("preempted", "resized", "stopped", "restarting", "quiet")


def css_of_kind(kind: str) -> str:
    """Good, calm or bad: how an attempt ended."""
    if kind in _GOOD:
        return "is-good"
    return "is-preempted" if kind in _CALM else "is-bad"


def timeline(run: RunView) -> Markup:
    """One row per attempt, the oldest first."""
    scale = Scale(0.0, run.wall_s or 1.0)
    num_rows = max(1, len(run.attempts))
    rows = [
        _row(attempt, index, num_rows, scale, run) for index, attempt in enumerate(run.attempts)
    ]
    every = -(-num_rows // 12)
    frame = Frame(
        "attempts on the wall clock",
        [Tick(scale.place(at), duration_text(at)) for at in duration_ticks(scale, 5)],
        [
            Tick(1 - (index + 0.5) / num_rows, str(attempt.number))
            for index, attempt in enumerate(run.attempts)
            if index % every == 0
        ],
        height_px=max(44, min(360, 30 * num_rows)),
        has_grid=False,
    )
    return framed(Markup("").join(rows), frame)


def _row(attempt: AttemptView, index: int, num_rows: int, scale: Scale, run: RunView) -> Markup:
    left = scale.place(attempt.start_s - run.start_s)
    right = scale.place(attempt.end_s - run.start_s)
    top, high = (index + 0.2) / num_rows, 0.6 / num_rows
    said = (
        f"attempt {attempt.number}: {attempt.kind}, steps {attempt.first_step} to "
        f"{attempt.last_step}, {duration_text(attempt.end_s - attempt.start_s)}"
    )
    bar = box(left, top, max(right - left, 0.002), high, "attempt", said)
    end = box(max(right - 0.004, left), top, 0.004, high, css_of_kind(attempt.kind), attempt.what)
    saved_s = [c.time_s - run.start_s for c in run.checkpoints if c.attempt == attempt.number]
    upper, lower = round((top + 0.25 * high) * SIZE, 1), round((top + 0.75 * high) * SIZE, 1)
    saves = "".join(f"M{across(scale.place(at_s))} {upper}V{lower}" for at_s in saved_s)
    return bar + Markup('<path class="save" d="{}"/>').format(saves) + end
