"""The panels of the live view: functions from values and a size to lines of text."""

from __future__ import annotations

import time

import numpy as np
from rich.text import Text

from drivetrain.record.expert_load import LoadRecord, shape_of
from drivetrain.view.charts import css_of_kind
from drivetrain.view.palette import SHADES, colour_of, words
from drivetrain.view.run_view import LedgerView, RankMeans, RunView
from drivetrain.view.series import (
    ChartSeries,
    Scale,
    duration_text,
    from_zero,
    number_text,
    value_scale,
)

# The bit of U+2800 for each dot, by its place in the cell: (column, row from the top).
_BITS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))


def braille(series: ChartSeries, x: Scale, y: Scale, width: int, height: int) -> list[str]:
    """Draw a curve as `height` lines of `width` cells; a column spans its lowest to highest."""
    drawn = series.finite
    if drawn.is_empty or width < 1 or height < 1:
        return [" " * width] * height
    across = np.clip(x.at(drawn.steps), 0, 1) * (2 * width - 1)
    down = np.clip(1 - y.at(drawn.values), 0, 1) * (4 * height - 1)
    cells = np.zeros((height, width), dtype=np.int64)
    for column, top, bottom in _extents(across, down):
        for row in range(top, bottom + 1):
            cells[row // 4, column // 2] |= _BITS[column % 2][row % 4]
    return [
        "".join(chr(0x2800 + bits) if bits else " " for bits in line) for line in cells.tolist()
    ]


def _extents(across: np.ndarray, down: np.ndarray) -> list[tuple[int, int, int]]:
    """Return each column of dots with the highest and lowest row of the line in it."""
    first, last = round(across[0]), round(across[-1])
    columns = np.arange(first, last + 1)
    # where the line enters and leaves the column, and every point in between
    edges = np.interp([columns - 0.5, columns + 0.5], across, down)
    top, bottom = edges.min(axis=0), edges.max(axis=0)
    place = np.rint(across).astype(np.int64) - first
    np.minimum.at(top, place, down)
    np.maximum.at(bottom, place, down)
    rows = (columns, np.rint(top).astype(int), np.rint(bottom).astype(int))
    return list(zip(*(each.tolist() for each in rows), strict=True))


_LABEL = 8
_STYLE_OF_END = {
    "is-good": colour_of("good").dark,
    "is-bad": colour_of("bad").dark,
    "is-preempted": colour_of("preempted").dark,
}


def style_of_kind(kind: str) -> str:
    """Return the terminal style for how an attempt ended."""
    return _STYLE_OF_END[css_of_kind(kind)]


def curve_lines(
    series: ChartSeries, width: int, height: int, *, is_rate: bool = False
) -> list[Text]:
    """Draw a curve with its range at the side and its steps below."""
    if series.is_empty or width < _LABEL + 4 or height < 3:
        return [Text("nothing recorded yet", style="dim")]
    y = from_zero(series.values) if is_rate else value_scale(series.values)
    first, last = float(series.steps[0]), float(series.steps[-1])
    x = Scale(first, last if last > first else first + 1)
    drawn = braille(series, x, y, width - _LABEL, height - 1)
    labels = {0: number_text(_rounded(y.high)), len(drawn) - 1: number_text(_rounded(y.low))}
    lines = []
    for index, cells in enumerate(drawn):
        text = Text().append(f"{labels.get(index, ''):>{_LABEL - 1}} ", style="dim")
        lines.append(text.append(cells, style=colour_of("productive").dark))
    left, right = f"{first:,.0f}", f"{last:,.0f}"
    broken = series.broken_steps.size
    gap = " " * max(1, width - _LABEL - len(left) - len(right))
    axis = Text(" " * _LABEL + left + gap + right, style="dim")
    if broken:
        are = "value is" if broken == 1 else "values are"
        axis = Text(f"{broken:,} {are} not finite, first at step {series.broken_steps[0]:,.0f}")
        axis.stylize(f"bold {colour_of('bad').dark}")
    return [*lines, axis]


def ledger_lines(ledger: LedgerView | None, width: int, height: int) -> list[Text]:
    """Draw a bar per class that took time, the largest first, until the lines run out."""
    if ledger is None or not ledger.wall_s:
        return [Text("nothing to account for yet", style="dim")]
    taken = sorted(((s, name) for name, s in ledger.seconds.items() if s > 0), reverse=True)
    has_durations = width >= 46
    room = max(3, width - (38 if has_durations else 25))
    lines = []
    for seconds, name in taken[:height]:
        length = max(1, round(seconds / taken[0][0] * room))
        text = Text(f"{words(name):<16} ")
        text.append("█" * length, style=colour_of(name).dark)
        text.append(" " * (room - length) + f"{ledger.share(name):>7.1%}")
        lines.append(text.append(f" {duration_text(seconds):>12}" if has_durations else ""))
    return lines


def attempt_lines(run: RunView, height: int) -> list[Text]:
    """List the last attempts, the newest at the end."""
    lines = []
    for attempt in list(run.attempts)[-height:]:
        text = Text(f"{attempt.number:>3} ")
        text.append(f"{attempt.kind:<10}", style=style_of_kind(attempt.kind))
        text.append(f" {attempt.steps}")
        text.append(f"  {duration_text(attempt.end_s - attempt.start_s)}", style="dim")
        if attempt.what:
            text.append(f"  {attempt.what}", style="dim")
        lines.append(text)
    return lines or [Text("none yet", style="dim")]


def expert_lines(load: LoadRecord, width: int, height: int) -> list[Text]:
    """Show the most uneven layers: bars of the experts, and the busiest one's share."""
    room = max(4, min(32, width - 16))
    shapes = [shape_of(name, tokens, room) for name, tokens in load.layers.items()]
    shapes.sort(key=lambda shape: -shape.busiest)
    lines = []
    for shape in shapes[:height]:
        text = Text().append(shape.bars, style=colour_of("productive").dark)
        text.append(f" {shape.busiest:.1f}× ").append(f"{shape.name} {shape.expert}", style="dim")
        lines.append(text)
    return lines


def event_lines(run: RunView, height: int) -> list[Text]:
    """List the last events, the newest at the end."""
    lines = []
    for event in list(run.events)[-height:]:
        at = time.strftime("%H:%M:%S", time.localtime(event.time_s))
        lines.append(Text().append(f"{at} ", style="dim").append(event.what))
    return lines or [Text("none yet", style="dim")]


def header_line(run: RunView, width: int) -> Text:
    """Return the header: name, state, progress and remaining time."""
    text = Text(f" {run.name} ", style="bold")
    text.append(f" {run.state} ", style=f"bold reverse {style_of_kind(run.state)}")
    of = f"/{run.total_steps:,}" if run.total_steps else ""
    text.append(f"  step {run.step:,}{of}  ")
    if run.total_steps:
        room = max(0, min(30, width - text.cell_len - 30))
        done = min(room, round(run.step / run.total_steps * room))
        text.append("━" * done, style=colour_of("productive").dark)
        text.append("━" * (room - done), style="grey37")
    text.append(f"  {duration_text(run.wall_s)}", style="dim")
    remaining_s = _remaining_s(run)
    if remaining_s is not None:
        text.append(f"  ETA {duration_text(remaining_s)}", style="dim")
    return text


def _remaining_s(run: RunView) -> float | None:
    """Estimate from the last steps' duration; only while running."""
    means = run.recent
    if run.state != "running" or not run.total_steps or means is None:
        return None
    step_s = means.step_s
    known = step_s[np.isfinite(step_s)]
    return float(np.median(known)) * (run.total_steps - run.step) if known.size else None


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


# Ranks in a terminal: a bar for each if they fit, otherwise a map.
#
# Characters differ as well as colours, so that it can be read without colours.

_BLOCKS = {"compute": "█", "data_wait": "▓", "communication": "░"}
_DENSITY = "·░▒▓█"
_RANK_LABEL = 6


def rank_lines(means: RankMeans, width: int, height: int) -> list[Text]:
    """Return at most `height` lines of `width` cells."""
    if len(means.ranks) <= height - 1:
        return [_key(), *(_bar(means, index, width) for index in range(len(means.ranks)))]
    return _map(means, width, height)


def slowest_sentence(means: RankMeans) -> str:
    """Name the rank with the most own work, compared with the median."""
    own_s = means.own_s
    known = np.isfinite(own_s)
    if not known.any():
        return ""
    median_s = float(np.median(own_s[known]))
    at = int(np.nanargmax(own_s))
    more = float(own_s[at]) / median_s - 1 if median_s else 0.0
    return f"slowest: {means.ranks[at]}, {duration_text(float(own_s[at]))}, {more:+.0%}"


def _key() -> Text:
    text = Text()
    for part, block in _BLOCKS.items():
        text.append(f"{block} ", style=colour_of(part).dark)
        text.append(f"{words(part)}  ", style="dim")
    return text


def _bar(means: RankMeans, index: int, width: int) -> Text:
    label = f"{means.ranks[index]:>{_RANK_LABEL - 1}} "
    seconds = {part: float(means.seconds[part][index]) for part in _BLOCKS}
    total_s = sum(seconds.values())
    if not np.isfinite(total_s):
        return Text(f"{label}no steps yet", style="dim")
    room = max(4, width - len(label) - 9)
    longest_s = float(np.nanmax(sum(means.seconds[part] for part in _BLOCKS))) or 1.0
    text = Text().append(label, style="dim")
    filled, so_far_s = 0, 0.0
    for part, block in _BLOCKS.items():
        so_far_s += seconds[part]
        until = round(so_far_s / longest_s * room)
        text.append(block * (until - filled), style=colour_of(part).dark)
        filled = until
    text.append(" " * (room - filled) + f"{duration_text(total_s):>9}")
    return text


def _map(means: RankMeans, width: int, height: int) -> list[Text]:
    """Draw one cell per rank or group of ranks; the slowest one determines the shade."""
    own_s = means.own_s
    known = own_s[np.isfinite(own_s)]
    if known.size == 0:
        return [Text("no steps yet", style="dim")]
    columns = max(1, width - _RANK_LABEL)
    per_cell = -(-own_s.size // (max(1, columns - 7) * max(1, height - 1)))
    slowest = np.fmax.reduceat(own_s, np.arange(0, own_s.size, per_cell))
    wide = _widest_cell(slowest.size, columns, height - 1)
    per_line = columns // wide
    per_line -= per_line % 8 if per_line > 16 else 0  # nodes have eight or four ranks
    low_s = min(float(np.percentile(known, 5)), 0.8 * float(known.max()))
    span_s = (float(known.max()) - low_s) or 1.0
    each = "a cell is a rank" if per_cell == 1 else f"a cell is the slowest of {per_cell} ranks"
    lines = [Text(f"{each}; █ {duration_text(float(known.max()))} of own work", style="dim")]
    for start in range(0, slowest.size, per_line):
        text = Text().append(f"{means.ranks[start * per_cell]:>{_RANK_LABEL - 1}} ", style="dim")
        for value in slowest[start : start + per_line]:
            block, style = _cell(float(value), low_s, span_s)
            text.append(block * wide, style)
        lines.append(text)
    return lines


def _widest_cell(num_cells: int, columns: int, num_lines: int) -> int:
    """Return the widest cell that fits: with few ranks, cells are wider."""
    fitting = (w for w in (4, 3, 2) if -(-num_cells // max(1, columns // w - 7)) <= num_lines)
    return next(fitting, 1)


def _cell(value: float, low_s: float, span_s: float) -> tuple[str, str]:
    if not np.isfinite(value):
        return " ", ""
    share = min(1.0, max(0.0, (value - low_s) / span_s))
    # the darkest shades are invisible on a dark terminal
    shade = SHADES[2 + round(share * (len(SHADES) - 3))].dark
    return _DENSITY[round(share * (len(_DENSITY) - 1))], shade
