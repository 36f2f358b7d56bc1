"""GridBuilder: from every rank's steps to a grid of a size that fits a page, in one pass.

Each rank has the same few columns. When the steps outgrow them, two columns become one and the rest
is free again: what is kept never grows with the number of steps, and no step is read twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drivetrain.view.run_view import RankGrid, Table

PARTS = {
    "compute": "compute_s",
    "data_wait": "data_wait_s",
    "communication": "communication_s",
}
"""What of a step is shown, and its field in a step's record."""
_MOST_COLUMNS = 96
_MOST_ROWS = 64


class GridBuilder:
    """Sums of seconds and counts of steps, by rank and column."""

    def __init__(self, ranks: Sequence[int], most_columns: int = _MOST_COLUMNS) -> None:
        self._ranks = tuple(ranks)
        self._width = 1
        shape = (len(self._ranks), most_columns)
        self._sums = {part: np.zeros(shape) for part in PARTS}
        self._counts = np.zeros(shape)
        self._last_step = 0

    def take(self, row: int, table: NDArray[Any]) -> None:
        """More records of the rank in that row."""
        if not len(table):
            return
        steps = table["step"].astype(np.int64)
        self._last_step = max(self._last_step, int(steps.max()))
        num_columns = self._counts.shape[1]
        while (self._last_step - 1) // self._width >= num_columns:
            self._halve()
        column = np.maximum(steps - 1, 0) // self._width
        self._counts[row] += np.bincount(column, minlength=num_columns)
        for part, field in PARTS.items():
            self._sums[part][row] += np.bincount(column, table[field], num_columns)

    def grid(self, most_rows: int = _MOST_ROWS) -> RankGrid | None:
        """What has been taken in so far; None without a step."""
        if not self._last_step or not self._ranks:
            return None
        num_columns = -(-self._last_step // self._width)
        per_row = -(-len(self._ranks) // most_rows)
        starts = np.arange(0, len(self._ranks), per_row)
        with np.errstate(invalid="ignore", divide="ignore"):
            seconds = {
                part: _slowest((sums / self._counts)[:, :num_columns], starts)
                for part, sums in self._sums.items()
            }
        step_edges = [1 + column * self._width for column in range(num_columns)]
        return RankGrid(
            rank_edges=[self._ranks[start] for start in starts.tolist()] + [self._ranks[-1] + 1],
            step_edges=[*step_edges, self._last_step + 1],
            seconds=seconds,
        )

    def _halve(self) -> None:
        self._width *= 2
        self._counts = _paired(self._counts)
        self._sums = {part: _paired(sums) for part, sums in self._sums.items()}


def _paired(table: NDArray[np.float64]) -> NDArray[np.float64]:
    paired = table[:, 0::2] + table[:, 1::2]
    return np.hstack([paired, np.zeros_like(paired)])


def _slowest(means: NDArray[np.float64], starts: NDArray[np.int64]) -> Table:
    # fmax passes over NaN: a rank without steps there does not hide its neighbours
    return np.asarray(np.fmax.reduceat(means, starts, axis=0), dtype=np.float32)
