"""Charts: functions from values to HTML. No state, no files; all text is escaped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from drivetrain.record.ledger import BETWEEN_RUNS
from drivetrain.view.palette import css_of, words
from drivetrain.view.run_view import AttemptView, LedgerView, RankGrid, RunView, Table
from drivetrain.view.series import (
    ChartSeries,
    Scale,
    duration_text,
    duration_ticks,
    from_zero,
    number_text,
    smoothed,
    step_ticks,
    thinned,
    ticks,
    value_scale,
)

# The frame around a plot: axes whose labels keep their size while the drawing is stretched.
#
# A drawing is an SVG of 1000 × 1000 units, stretched to the available space. Lines keep their width
# (`vector-effect`), and labels are text beside it, positioned in per cent.

SIZE = 1000


@dataclass(frozen=True)
class Tick:
    """A label on an axis, at a position between 0 and 1."""

    at: float
    text: str


@dataclass(frozen=True)
class ChartFrame:
    """Title, axes and size of a drawing."""

    title: str
    """Also the label for screen readers."""
    x: Sequence[Tick]
    y: Sequence[Tick]
    height_px: int = 200
    has_grid: bool = True


def framed(drawing: Markup, frame: ChartFrame) -> Markup:
    """Return the drawing with its axes as one figure."""
    return Markup(
        '<div class="chart" style="--height:{}px" role="img" aria-label="{}">'
        '<div class="y-axis">{}</div><div class="plot">'
        '<svg viewBox="0 0 {} {}" preserveAspectRatio="none" aria-hidden="true">{}{}</svg></div>'
        '<div class="x-axis">{}</div></div>'
    ).format(
        frame.height_px,
        frame.title,
        _labels(frame.y, "bottom"),
        SIZE,
        SIZE,
        _grid(frame.y) if frame.has_grid else "",
        drawing,
        _labels(frame.x, "left"),
    )


def across(fraction: float) -> str:
    """Return a fraction as an x coordinate of the drawing."""
    return _short(fraction * SIZE)


def up(fraction: float) -> str:
    """Return a fraction as a y coordinate of the drawing, which counts from the top."""
    return _short((1.0 - fraction) * SIZE)


def box(x: float, y: float, width: float, height: float, css: str, words: str = "") -> Markup:
    """Return a rectangle, in fractions from the upper left; `words` is its tooltip."""
    shape = Markup('<rect class="{}" x="{}" y="{}" width="{}" height="{}">').format(
        css, _short(x * SIZE), _short(y * SIZE), _short(width * SIZE), _short(height * SIZE)
    )
    title = Markup("<title>{}</title>").format(words) if words else ""
    return Markup("{}{}</rect>").format(shape, title)


def upright(fraction: float, css: str, words: str = "") -> Markup:
    """Return a line from top to bottom."""
    title = Markup("<title>{}</title>").format(words) if words else ""
    return Markup('<path class="{}" d="M{} 0V{}">{}</path>').format(
        css, across(fraction), SIZE, title
    )


def legend(entries: Sequence[tuple[str, str]]) -> Markup:
    """Return a legend, from pairs of CSS class and label."""
    items = Markup("").join(
        Markup('<li><i class="swatch {}"></i>{}</li>').format(css, word) for css, word in entries
    )
    return Markup('<ul class="legend">{}</ul>').format(items)


def _grid(ticks: Sequence[Tick]) -> Markup:
    lines = "".join(f"M0 {up(tick.at)}H{SIZE}" for tick in ticks if 0 <= tick.at <= 1)
    return Markup('<path class="grid" d="{}"/>').format(lines) if lines else Markup("")


def _labels(ticks: Sequence[Tick], side: str) -> Markup:
    shown = (tick for tick in ticks if -0.001 <= tick.at <= 1.001)
    return Markup("").join(
        Markup('<span style="{}:{}%">{}</span>').format(side, _short(tick.at * 100), tick.text)
        for tick in shown
    )


def _short(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")


# Curves of one scalar over steps, one line per run.

_COLUMNS = 600
"""About as many as a curve is pixels wide; more would be invisible."""


@dataclass(frozen=True)
class ChartLine:
    """A series and the CSS class it is drawn with."""

    series: ChartSeries
    css: str = "line-1"


@dataclass(frozen=True)
class Curve:
    """The content of one chart."""

    title: str
    lines: Sequence[ChartLine]
    starts_at_zero: bool = False
    has_trend: bool = False
    """Whether to draw a running mean over a noisy line, which is then faint."""
    marks: Sequence[tuple[float, str]] = ()
    """Steps to mark, with what happened there."""


def curve(shown: Curve) -> Markup:
    """Draw the lines on common axes; non-finite values are marked in red."""
    x, y = _scales(shown)
    drawing = [upright(x.place(at), "mark", words) for at, words in shown.marks]
    for line in shown.lines:
        drawing.append(_drawn(line, x, y, has_trend=shown.has_trend))
        drawing.extend(
            upright(x.place(step), "broken", f"step {step:.0f}: not a finite number")
            for step in _spread_out(line.series.broken_steps)
        )
    frame = ChartFrame(
        shown.title,
        [Tick(x.place(tick), f"{tick:,.0f}") for tick in step_ticks(x, 5)],
        [Tick(y.place(tick), number_text(tick)) for tick in ticks(y, 4)],
    )
    return framed(Markup("").join(drawing), frame)


def path_of(series: ChartSeries, x: Scale, y: Scale) -> str:
    """Return the line as SVG path data, with gaps where a value is not finite."""
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


def _drawn(line: ChartLine, x: Scale, y: Scale, *, has_trend: bool) -> Markup:
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
    """Return at most `most` of the steps, evenly spread."""
    chosen = steps if steps.size <= most else steps[:: -(-steps.size // most)]
    return [float(step) for step in chosen]


# The heat map: ranks down, steps across, duration as colour.
#
# Cells of one shade are one path, and neighbours in a row are merged, so that a page for four
# thousand ranks has only a few hundred kilobytes.

NUM_SHADES = 9


@dataclass(frozen=True)
class Shades:
    """The range of seconds that the shades cover."""

    low_s: float
    high_s: float

    def of(self, seconds: Table) -> np.ndarray:
        """Return the shade of each value, from 0 to NUM_SHADES - 1; -1 for missing values."""
        span_s = (self.high_s - self.low_s) or 1.0
        with np.errstate(invalid="ignore"):
            shade = (seconds - self.low_s) / span_s * NUM_SHADES
        shade = np.where(np.isfinite(seconds), np.clip(shade, 0, NUM_SHADES - 1), -1)
        return np.asarray(np.floor(shade), dtype=np.int64)


def shades_for(part: str, seconds: Table, step_s: float = 0.0) -> Shades:
    """Choose the range: waiting starts at zero, work at the fastest value, to show slow ranks.

    Insignificant differences are not exaggerated: the range covers at least a fifth of the work,
    or for waiting a tenth of a step.
    """
    known = seconds[np.isfinite(seconds)]
    if known.size == 0:
        return Shades(0.0, 1.0)
    # the first step compiles, allocates and connects: it must not determine the scale
    high_s = float(np.percentile(known, 99.5))
    if part != "compute":
        return Shades(0.0, max(high_s, 0.1 * step_s) or 1e-3)
    return Shades(min(float(np.percentile(known, 1)), 0.8 * high_s), high_s)


def heat(grid: RankGrid, part: str) -> Markup:
    """Draw one part of the steps for every rank."""
    seconds = grid.seconds[part]
    shades = shades_for(part, seconds, _typical_step_s(grid))
    paths = [
        Markup('<path class="shade-{}" d="{}"/>').format(shade, data)
        for shade, data in enumerate(_cells_by_shade(shades.of(seconds)))
        if data
    ]
    num_rows = seconds.shape[0]
    scale = Scale(float(grid.step_edges[0]), float(grid.step_edges[-1]))
    frame = ChartFrame(
        f"{part} of each rank over the steps",
        [Tick(scale.place(tick), f"{tick:,.0f}") for tick in step_ticks(scale, 4)],
        _rank_ticks(grid),
        height_px=max(72, min(260, 26 * num_rows)),
        has_grid=False,
    )
    return framed(Markup("").join(paths), frame) + _key(shades)


def _typical_step_s(grid: RankGrid) -> float:
    whole = np.sum([*grid.seconds.values()], axis=0)
    known = whole[np.isfinite(whole)]
    return float(np.median(known)) if known.size else 0.0


def _cells_by_shade(shade: np.ndarray) -> list[str]:
    num_rows, num_columns = shade.shape
    high, wide = SIZE / num_rows, SIZE / num_columns
    data: list[list[str]] = [[] for _ in range(NUM_SHADES)]
    for row in range(num_rows):
        line = shade[row]
        starts = np.flatnonzero(np.append(True, line[1:] != line[:-1]))
        ends = np.append(starts[1:], num_columns)
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            if line[start] >= 0:
                left, right = round(start * wide), round(end * wide)
                top, bottom = round(row * high), round((row + 1) * high)
                data[line[start]].append(f"M{left} {top}H{right}V{bottom}H{left}z")
    return ["".join(pieces) for pieces in data]


def _rank_ticks(grid: RankGrid) -> list[Tick]:
    num_rows = len(grid.rank_edges) - 1
    every = -(-num_rows // 8)
    return [
        Tick(1 - (row + 0.5) / num_rows, f"{grid.rank_edges[row]:,}")
        for row in range(0, num_rows, every)
    ]


def _key(shades: Shades) -> Markup:
    boxes = Markup("").join(
        Markup('<i class="shade-{}"></i>').format(shade) for shade in range(NUM_SHADES)
    )
    return Markup('<div class="key"><span>{}</span>{}<span>{}</span></div>').format(
        duration_text(shades.low_s), boxes, duration_text(shades.high_s)
    )


# The ledger: one bar for the total, its table, and a chart over time.


def ledger_bar(ledger: LedgerView) -> Markup:
    """Draw one bar for the whole run."""
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
    """Return a table of the classes that took time, in the bar's order."""
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
    if ledger.between_runs_s:
        rows.append(
            Markup('<tr><td>{}</td><td class="number">{}</td><td></td></tr>').format(
                BETWEEN_RUNS, duration_text(ledger.between_runs_s)
            )
        )
    return Markup('<table class="tight">{}</table>').format(Markup("").join(rows))


def ledger_over_time(ledger: LedgerView) -> Markup:
    """Draw a column per interval of the wall clock, filled with the classes' shares."""
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
                # slightly wider than its bin, so that no background shows between two
                columns.append(
                    box(float(left[index]), below - share, width * 1.04, share, css_of(name), said)
                )
            below -= share
    frame = ChartFrame(
        "where the time went, over the run",
        [Tick(scale.place(at), duration_text(at)) for at in duration_ticks(scale, 5)],
        [Tick(at, f"{at:.0%}") for at in (0.0, 0.5, 1.0)],
        has_grid=False,
    )
    return framed(Markup("").join(columns), frame)


_GOOD = ("finished", "running", "starting")
_CALM = ("preempted", "resized", "stopped", "restarting", "quiet")


def css_of_kind(kind: str) -> str:
    """Return the CSS class for how an attempt ended."""
    if kind in _GOOD:
        return "is-good"
    return "is-preempted" if kind in _CALM else "is-bad"


def timeline(run: RunView) -> Markup:
    """Draw one row per attempt, the oldest first."""
    scale = Scale(0.0, run.span_s or 1.0)
    num_rows = max(1, len(run.attempts))
    rows = [
        _row(attempt, index, num_rows, scale, run) for index, attempt in enumerate(run.attempts)
    ]
    every = -(-num_rows // 12)
    frame = ChartFrame(
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
        f"attempt {attempt.number}: {attempt.kind}, steps: {attempt.steps}, "
        f"{duration_text(attempt.end_s - attempt.start_s)}"
    )
    bar = box(left, top, max(right - left, 0.002), high, "attempt", said)
    end = box(max(right - 0.004, left), top, 0.004, high, css_of_kind(attempt.kind), attempt.what)
    saved_s = [c.time_s - run.start_s for c in run.checkpoints if c.attempt == attempt.number]
    upper, lower = round((top + 0.25 * high) * SIZE, 1), round((top + 0.75 * high) * SIZE, 1)
    saves = "".join(f"M{across(scale.place(at_s))} {upper}V{lower}" for at_s in saved_s)
    return bar + Markup('<path class="save" d="{}"/>').format(saves) + end
