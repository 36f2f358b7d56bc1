"""Curves in braille: each cell of a terminal holds two by four dots."""

from __future__ import annotations

import numpy as np

from drivetrain.view.scale import Scale
from drivetrain.view.series import Series

# Which bit of U+2800 a dot is, by its place in the cell: (column, row from the top).
_BITS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))


def braille(series: Series, x: Scale, y: Scale, width: int, height: int) -> list[str]:
    """The curve as `height` lines of `width` cells; every column shows its lowest to highest."""
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
    """Each column of dots with the highest and lowest row the line reaches in it."""
    first, last = round(across[0]), round(across[-1])
    columns = np.arange(first, last + 1)
    # where the line crosses into the column and out of it, and every point in between
    edges = np.interp([columns - 0.5, columns + 0.5], across, down)
    top, bottom = edges.min(axis=0), edges.max(axis=0)
    place = np.rint(across).astype(np.int64) - first
    np.minimum.at(top, place, down)
    np.maximum.at(bottom, place, down)
    rows = (columns, np.rint(top).astype(int), np.rint(bottom).astype(int))
    return list(zip(*(each.tolist() for each in rows), strict=True))
