"""Series and Scale: a scalar over steps, and the position of values in a chart."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Series: one scalar over steps, and how it is downsampled without visible loss.
#
# A curve of a million points on six hundred columns of pixels shows, in each column, where the line
# enters, its lowest and highest point, and where it leaves. These four points per column draw the
# same pixels as all of them (M4, Jugel et al., VLDB 2014); an average would hide the spikes.

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class ChartSeries:
    """A scalar's values in step order, including non-finite ones."""

    name: str
    steps: Floats
    values: Floats

    @property
    def is_empty(self) -> bool:
        """Whether there are no points."""
        return self.steps.size == 0

    @property
    def last(self) -> float:
        """The newest value; NaN if there is none."""
        return float(self.values[-1]) if self.values.size else float("nan")

    @property
    def finite(self) -> ChartSeries:
        """The finite points only."""
        kept = np.isfinite(self.values)
        return ChartSeries(self.name, self.steps[kept], self.values[kept])

    @property
    def broken_steps(self) -> Floats:
        """Steps at which the value is NaN or infinite."""
        return self.steps[~np.isfinite(self.values)]


def make_series(name: str, steps: Any, values: Any) -> ChartSeries:
    """Sort by step; of a repeated step, keep the last value."""
    at = np.asarray(steps, dtype=np.float64)
    of = np.asarray(values, dtype=np.float64)
    order = np.argsort(at, kind="stable")
    at, of = at[order], of[order]
    is_last = np.append(at[1:] != at[:-1], True) if at.size else np.zeros(0, dtype=bool)
    return ChartSeries(name, at[is_last], of[is_last])


def thinned(series: ChartSeries, num_columns: int) -> ChartSeries:
    """Keep at most four points per column, in order: first, lowest, highest, last."""
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
    return ChartSeries(series.name, series.steps[kept], series.values[kept])


def smoothed(series: ChartSeries, num_points: int = 400) -> ChartSeries:
    """Return a running mean over a fiftieth of the curve, as the trend of a noisy one."""
    drawn = series.finite
    width = drawn.values.size // 50
    if width < 3:
        return drawn
    total = np.cumsum(np.insert(drawn.values, 0, 0.0))
    ends = np.unique(np.linspace(1, drawn.values.size, num_points).astype(np.int64))
    starts = np.maximum(0, ends - width)
    means = (total[ends] - total[starts]) / (ends - starts)
    return ChartSeries(series.name, drawn.steps[ends - 1], means)


def _corners(values: Floats, offset: int) -> list[int]:
    if not np.isfinite(values).all():
        # a gap in the line is visible: keep all points of such a column
        return list(range(offset, offset + values.size))
    corners = {0, values.size - 1, int(values.argmin()), int(values.argmax())}
    return [offset + index for index in sorted(corners)]


_TITLES = {
    "train/loss": "Loss",
    "train/learning_rate": "Learning rate",
    "train/grad_norm": "Gradient norm",
    "throughput/samples_per_sec": "Samples per second",
    "throughput/tokens_per_sec": "Tokens per second",
    "experts/busiest": "Busiest expert, multiple of its share",
    "experts/idle": "Share of experts without tokens",
    "throughput/device/mfu": "Model FLOPs utilisation",
}
_FIRST = ("train/loss", "val/", "throughput/", "train/", "system/")


def title_of(name: str) -> str:
    """Return a scalar's title: train/loss → 'Loss'; other names are their own title."""
    if name.startswith("val/"):
        return f"Validation {name.removeprefix('val/').replace('_', ' ')}"
    return _TITLES.get(name, name)


def is_drawn(name: str) -> bool:
    """Whether to draw a curve; the parts of a step are in the ledger and the rank map instead."""
    return not name.startswith("time/")


def is_about_the_machine(name: str) -> bool:
    """Whether a scalar is a system metric."""
    return name.startswith("system/")


def order_of(name: str) -> tuple[int, str]:
    """Sort key: loss, validation, throughput, training, system metrics, then the rest."""
    rank = next((i for i, start in enumerate(_FIRST) if name.startswith(start)), len(_FIRST))
    return rank, name


# Scale: maps values to positions between 0 and 1, with round ticks.

_MINUTE_S, _HOUR_S, _DAY_S = 60.0, 3600.0, 86400.0
_DURATIONS_S = (
    *(0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0),
    *(m * _MINUTE_S for m in (1, 2, 5, 10, 20, 30)),
    *(h * _HOUR_S for h in (1, 2, 4, 6, 12)),
    *(d * _DAY_S for d in (1, 2, 5, 10, 20, 50, 100)),
)


@dataclass(frozen=True)
class Scale:
    """Maps values to positions between two ends."""

    low: float
    high: float
    is_log: bool = False

    def at(self, values: Floats) -> Floats:
        """Return positions: 0 at the low end, 1 at the high end; other values lie beyond them."""
        low, high = self.low, self.high
        if self.is_log:
            low, high = math.log10(low), math.log10(high)
            with np.errstate(divide="ignore", invalid="ignore"):
                values = np.log10(values)
        return (values - low) / ((high - low) or 1.0)

    def place(self, value: float) -> float:
        """Return the position of one value."""
        return float(self.at(np.array([value]))[0])


def value_scale(values: Floats) -> Scale:
    """Return a curve's scale with a margin; logarithmic if the values span more than fifty-fold."""
    drawn = values[np.isfinite(values)]
    if drawn.size == 0:
        return Scale(0.0, 1.0)
    low, high = float(drawn.min()), float(drawn.max())
    if low > 0 and high / low > 50:
        air = (high / low) ** 0.04
        return Scale(low / air, high * air, is_log=True)
    air = 0.06 * (high - low) or abs(high) * 0.1 or 1.0
    return Scale(min(low, 0.0) if low >= 0 and low < air else low - air, high + air)


def from_zero(values: Floats) -> Scale:
    """Return a scale that starts at zero, for rates and seconds."""
    drawn = values[np.isfinite(values)]
    return Scale(0.0, (float(drawn.max()) if drawn.size else 0.0) * 1.08 or 1.0)


def ticks(scale: Scale, count: int) -> list[float]:
    """Return about `count` round values within the scale."""
    if scale.is_log:
        return _log_ticks(scale, count)
    step = _round_step((scale.high - scale.low) / max(1, count))
    first = math.ceil(scale.low / step - 1e-9)
    last = math.floor(scale.high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def step_ticks(scale: Scale, count: int) -> list[float]:
    """Return ticks that are whole steps."""
    return [tick for tick in ticks(scale, count) if tick == round(tick)]


def duration_ticks(scale: Scale, count: int) -> list[float]:
    """Return ticks at round seconds, minutes, hours or days."""
    wanted = (scale.high - scale.low) / max(1, count)
    step = next((each for each in _DURATIONS_S if each >= wanted), _DURATIONS_S[-1])
    last = math.floor(scale.high / step + 1e-9)
    return [index * step for index in range(math.ceil(scale.low / step - 1e-9), last + 1)]


def number_text(value: float) -> str:
    """Format a number: 0.00025 → '2.5e-4', 12000 → '12k', 0.5 → '0.5'."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    size = abs(value)
    if size < 1e-3:
        mantissa, _, exponent = f"{value:.2e}".partition("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            scaled = value / (1e3 if suffix == "k" else limit)
            return f"{scaled:.4g}{suffix}"
    return f"{value:.4g}"


def duration_text(seconds: float) -> str:
    """Format a duration in one or two units: '42 ms', '3.5 s', '3 min 20 s', '2 h 5 min'."""
    if seconds < 0.9995:
        return "0 s" if seconds <= 0 else f"{seconds * 1e3:.3g} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s".replace(".0 s", " s")
    whole = round(seconds)
    for (size, unit), (part, part_unit) in _UNITS:
        if whole >= size:
            rest = (whole % size) // part if part else 0
            return f"{whole // size} {unit}" + (f" {rest} {part_unit}" if rest else "")
    raise AssertionError("unreachable")


_UNITS = (
    ((86400, "d"), (3600, "h")),
    ((3600, "h"), (60, "min")),
    ((60, "min"), (1, "s")),
    ((1, "s"), (0, "")),
)


def _round_step(wanted: float) -> float:
    power = 10.0 ** math.floor(math.log10(wanted))
    # rather a few more ticks than too few
    return next(m * power for m in (1.0, 2.0, 5.0, 10.0) if m * power >= wanted * 0.75)


def _log_ticks(scale: Scale, count: int) -> list[float]:
    decades = range(math.floor(math.log10(scale.low)), math.ceil(math.log10(scale.high)) + 1)
    for multiples in ((1, 2, 5), (1, 3), (1,)):
        found = [m * 10.0**d for d in decades for m in multiples]
        inside = [each for each in found if scale.low <= each <= scale.high]
        if len(inside) <= count + 1:
            return inside
    return inside[:: math.ceil(len(inside) / (count + 1))]
