"""Series: one scalar over steps, and how it is thinned out without losing what an eye would see.

A curve of a million points on six hundred columns of pixels shows, in each column, where the line
enters, how low and how high it goes and where it leaves. Those four points per column draw the same
pixels as all of them (M4, Jugel et al., VLDB 2014); an average would hide the spikes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Series:
    """A scalar's values in the order of its steps; what is not finite stays in."""

    name: str
    steps: Floats
    values: Floats

    @property
    def is_empty(self) -> bool:
        """No point at all."""
        return self.steps.size == 0

    @property
    def last(self) -> float:
        """The newest value; NaN when there is none."""
        return float(self.values[-1]) if self.values.size else float("nan")

    @property
    def finite(self) -> Series:
        """Only what can be drawn."""
        kept = np.isfinite(self.values)
        return Series(self.name, self.steps[kept], self.values[kept])

    @property
    def broken_steps(self) -> Floats:
        """Where the value was not a number, or infinite."""
        return self.steps[~np.isfinite(self.values)]


def make_series(name: str, steps: Any, values: Any) -> Series:
    """Sorted by step; of a step that was done twice, the value that came last."""
    at = np.asarray(steps, dtype=np.float64)
    of = np.asarray(values, dtype=np.float64)
    order = np.argsort(at, kind="stable")
    at, of = at[order], of[order]
    is_last = np.append(at[1:] != at[:-1], True) if at.size else np.zeros(0, dtype=bool)
    return Series(name, at[is_last], of[is_last])


def thinned(series: Series, num_columns: int) -> Series:
    """At most four points per column: first, lowest, highest, last, in their order."""
    if series.steps.size <= 4 * num_columns:
        return series
    low, high = series.steps[0], series.steps[-1]
    column = ((series.steps - low) / (high - low) * num_columns).astype(np.int64)
    column = np.minimum(column, num_columns - 1)
    starts = np.flatnonzero(np.append(True, column[1:] != column[:-1]))
    ends = np.append(starts[1:], column.size)
    kept = [
        index
        for start, end in zip(starts, ends, strict=True)
        for index in _corners(series.values[start:end], int(start))
    ]
    return Series(series.name, series.steps[kept], series.values[kept])


def smoothed(series: Series, num_points: int = 400) -> Series:
    """A running mean over a fiftieth of the curve: the trend behind a noisy one."""
    drawn = series.finite
    width = drawn.values.size // 50
    if width < 3:
        return drawn
    total = np.cumsum(np.insert(drawn.values, 0, 0.0))
    ends = np.unique(np.linspace(1, drawn.values.size, num_points).astype(np.int64))
    starts = np.maximum(0, ends - width)
    means = (total[ends] - total[starts]) / (ends - starts)
    return Series(series.name, drawn.steps[ends - 1], means)


def _corners(values: Floats, offset: int) -> list[int]:
    if not np.isfinite(values).all():
        # a break in the line belongs to what is seen; columns that have one stay whole
        return list(range(offset, offset + values.size))
    corners = {0, values.size - 1, int(values.argmin()), int(values.argmax())}
    return [offset + index for index in sorted(corners)]


_TITLES = {
    "train/loss": "Loss",
    "train/learning_rate": "Learning rate",
    "train/grad_norm": "Gradient norm",
    "throughput/samples_per_sec": "Samples per second",
    "throughput/tokens_per_sec": "Tokens per second",
    "throughput/device/mfu": "Model FLOPs utilisation",
}
_FIRST = ("train/loss", "val/", "throughput/", "train/", "system/")


def title_of(name: str) -> str:
    """train/loss → 'Loss'; a name nobody foresaw is its own title."""
    if name.startswith("val/"):
        return f"Validation {name.removeprefix('val/').replace('_', ' ')}"
    return _TITLES.get(name, name)


def is_drawn(name: str) -> bool:
    """Not a step's seconds: the ledger and the map of ranks have them for every step."""
    return not name.startswith("time/")


def is_about_the_machine(name: str) -> bool:
    """Looked at when something is wrong."""
    return name.startswith("system/")


def order_of(name: str) -> tuple[int, str]:
    """Loss and validation first, then throughput, how it was trained, the machine, the rest."""
    rank = next((i for i, start in enumerate(_FIRST) if name.startswith(start)), len(_FIRST))
    return rank, name
