"""Ranks in a terminal: a bar for each while they fit, a map of them when they do not.

Shapes differ as well as colours, so that it can be read without any.
"""

from __future__ import annotations

import numpy as np
from rich.text import Text

from drivetrain.view.palette import SHADES, colour_of, words
from drivetrain.view.run_view import RankMeans
from drivetrain.view.scale import duration_text

_BLOCKS = {"compute": "█", "data_wait": "▓", "communication": "░"}
_DENSITY = "·░▒▓█"
_LABEL = 6


def rank_lines(means: RankMeans, width: int, height: int) -> list[Text]:
    """At most `height` lines of `width` cells."""
    if len(means.ranks) <= height - 1:
        return [_key(), *(_bar(means, index, width) for index in range(len(means.ranks)))]
    return _map(means, width, height)


def slowest_sentence(means: RankMeans) -> str:
    """Who needs longest before it has to wait for others, and how that compares to the median."""
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
    label = f"{means.ranks[index]:>{_LABEL - 1}} "
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
    """One cell per rank, or per some of them; the slowest of a cell decides its shade."""
    own_s = means.own_s
    known = own_s[np.isfinite(own_s)]
    if known.size == 0:
        return [Text("no steps yet", style="dim")]
    columns = max(1, width - _LABEL)
    per_cell = -(-own_s.size // (max(1, columns - 7) * max(1, height - 1)))
    slowest = np.fmax.reduceat(own_s, np.arange(0, own_s.size, per_cell))
    wide = _widest_cell(slowest.size, columns, height - 1)
    per_line = columns // wide
    per_line -= per_line % 8 if per_line > 16 else 0  # ranks sit on nodes by eights or fours
    low_s = min(float(np.percentile(known, 5)), 0.8 * float(known.max()))
    span_s = (float(known.max()) - low_s) or 1.0
    each = "a cell is a rank" if per_cell == 1 else f"a cell is {per_cell} ranks, the slowest shows"
    lines = [Text(f"{each}; █ {duration_text(float(known.max()))} of own work", style="dim")]
    for start in range(0, slowest.size, per_line):
        text = Text().append(f"{means.ranks[start * per_cell]:>{_LABEL - 1}} ", style="dim")
        for value in slowest[start : start + per_line]:
            block, style = _cell(float(value), low_s, span_s)
            text.append(block * wide, style)
        lines.append(text)
    return lines


def _widest_cell(num_cells: int, columns: int, num_lines: int) -> int:
    """Few ranks have cells that are more than a speck."""
    fitting = (w for w in (4, 3, 2) if -(-num_cells // max(1, columns // w - 7)) <= num_lines)
    return next(fitting, 1)


def _cell(value: float, low_s: float, span_s: float) -> tuple[str, str]:
    if not np.isfinite(value):
        return " ", ""
    share = min(1.0, max(0.0, (value - low_s) / span_s))
    # the darkest shades cannot be seen on a dark terminal
    shade = SHADES[2 + round(share * (len(SHADES) - 3))].dark
    return _DENSITY[round(share * (len(_DENSITY) - 1))], shade
