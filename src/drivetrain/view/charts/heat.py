"""The heat map: ranks down, steps across, how long each took in colour.

Cells of one shade are one path, and neighbours in a row are one stroke of it, so that four thousand
ranks make a page of some hundred kilobytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from drivetrain.view.charts.frame import SIZE, Frame, Tick, framed
from drivetrain.view.run_view import RankGrid, Table
from drivetrain.view.scale import Scale, duration_text, step_ticks

NUM_SHADES = 9


@dataclass(frozen=True)
class Shades:
    """Which seconds have which shade."""

    low_s: float
    high_s: float

    def of(self, seconds: Table) -> np.ndarray:
        """0 to NUM_SHADES - 1; -1 where there is nothing."""
        span_s = (self.high_s - self.low_s) or 1.0
        with np.errstate(invalid="ignore"):
            shade = (seconds - self.low_s) / span_s * NUM_SHADES
        shade = np.where(np.isfinite(seconds), np.clip(shade, 0, NUM_SHADES - 1), -1)
        return np.asarray(np.floor(shade), dtype=np.int64)


def shades_for(part: str, seconds: Table, step_s: float = 0.0) -> Shades:
    """Waiting counts from nothing; work from what the fastest needs, or a slow rank is not seen.

    Differences that do not matter are not stretched to look as if they did: of work, less than a
    fifth; of waiting, less than a tenth of a step.
    """
    known = seconds[np.isfinite(seconds)]
    if known.size == 0:
        return Shades(0.0, 1.0)
    # the first step compiles, allocates and connects: it must not set the scale for all others
    high_s = float(np.percentile(known, 99.5))
    if part != "compute":
        return Shades(0.0, max(high_s, 0.1 * step_s) or 1e-3)
    return Shades(min(float(np.percentile(known, 1)), 0.8 * high_s), high_s)


def heat(grid: RankGrid, part: str) -> Markup:
    """One part of the steps, of every rank."""
    seconds = grid.seconds[part]
    shades = shades_for(part, seconds, _typical_step_s(grid))
    paths = [
        Markup('<path class="shade-{}" d="{}"/>').format(shade, data)
        for shade, data in enumerate(_cells_by_shade(shades.of(seconds)))
        if data
    ]
    num_rows = seconds.shape[0]
    scale = Scale(float(grid.step_edges[0]), float(grid.step_edges[-1]))
    frame = Frame(
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
