"""Curves of one scalar over steps, one line per run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from drivetrain.view.charts.frame import Frame, Tick, across, framed, up, upright
from drivetrain.view.scale import Scale, from_zero, number_text, step_ticks, ticks, value_scale
from drivetrain.view.series import Series, smoothed, thinned

_COLUMNS = 600
"""About as many as a curve has pixels across; more could not be seen."""


@dataclass(frozen=True)
class Line:
    """A series and the css class it is drawn in."""

    series: Series
    css: str = "line-1"


@dataclass(frozen=True)
class Curve:
    """What one chart shows."""

    title: str
    lines: Sequence[Line]
    starts_at_zero: bool = False
    has_trend: bool = False
    """A running mean over a noisy line, which is then drawn faintly."""
    marks: Sequence[tuple[float, str]] = ()
    """Steps at which something happened, and what."""


def curve(shown: Curve) -> Markup:
    """The lines over one another, on common axes. Values that are no numbers are marked red."""
    x, y = _scales(shown)
    drawing = [upright(x.place(at), "mark", words) for at, words in shown.marks]
    for line in shown.lines:
        drawing.append(_drawn(line, x, y, has_trend=shown.has_trend))
        drawing.extend(
            upright(x.place(step), "broken", f"step {step:.0f}: not a finite number")
            for step in _spread_out(line.series.broken_steps)
        )
    frame = Frame(
        shown.title,
        [Tick(x.place(tick), f"{tick:,.0f}") for tick in step_ticks(x, 5)],
        [Tick(y.place(tick), number_text(tick)) for tick in ticks(y, 4)],
    )
    return framed(Markup("").join(drawing), frame)


def path_of(series: Series, x: Scale, y: Scale) -> str:
    """The line as path data; it breaks where a value is not finite."""
    right, high = x.at(series.steps), y.at(series.values)
    pieces, is_drawing = [], False
    for across_at, up_at in zip(right.tolist(), high.tolist(), strict=True):
        if not np.isfinite(up_at):
            is_drawing = False
            continue
        pieces.append(f"{'L' if is_drawing else 'M'}{across(across_at)} {up(up_at)}")
        is_drawing = True
    return "".join(pieces)


def _scales(shown: Curve) -> tuple[Scale, Scale]:
    steps = np.concatenate([line.series.steps for line in shown.lines] or [np.zeros(1)])
    values = np.concatenate([line.series.values for line in shown.lines] or [np.zeros(1)])
    ends = (float(steps.min()), float(steps.max())) if steps.size else (0.0, 1.0)
    x = Scale(ends[0], ends[1] if ends[1] > ends[0] else ends[0] + 1.0)
    return x, from_zero(values) if shown.starts_at_zero else value_scale(values)


def _drawn(line: Line, x: Scale, y: Scale, *, has_trend: bool) -> Markup:
    whole = thinned(line.series, _COLUMNS)
    if whole.finite.steps.size == 1:
        return Markup('<path class="dot {}" d="{}h0"/>').format(line.css, path_of(whole, x, y))
    trend = smoothed(line.series) if has_trend else line.series
    is_noisy = has_trend and trend.values.size < line.series.finite.values.size
    drawn = Markup('<path class="line {}{}" d="{}"/>').format(
        line.css, " faint" if is_noisy else "", path_of(whole, x, y)
    )
    if is_noisy:
        drawn += Markup('<path class="line {}" d="{}"/>').format(line.css, path_of(trend, x, y))
    return drawn


def _spread_out(steps: np.ndarray, most: int = 100) -> list[float]:
    """So many that nothing is hidden, and no more than can be told apart."""
    chosen = steps if steps.size <= most else steps[:: -(-steps.size // most)]
    return [float(step) for step in chosen]
