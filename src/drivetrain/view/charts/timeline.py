"""The timeline: every attempt as a bar on the wall clock, with its checkpoints and its end."""

from __future__ import annotations

from markupsafe import Markup

from drivetrain.view.charts.frame import SIZE, Frame, Tick, across, box, framed
from drivetrain.view.run_view import AttemptView, RunView
from drivetrain.view.scale import Scale, duration_text, duration_ticks

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
