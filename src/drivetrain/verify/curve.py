"""`verify curve`: does a new run learn like earlier runs with other seeds?

The expectation is a file with one curve per seed. At each of its steps the new run's value must lie
within the prediction interval of the seeds' values, mean ± t · s · √(1 + 1/n), at a level that all
steps share (Bonferroni): a run that is just another seed is rejected once in a hundred times. The
file also holds the steps: a run that evaluates at other steps is refused, not interpolated.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from statistics import fmean, stdev

from drivetrain.core.bounded import read_json
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.record.reading import open_run

FALSE_ALARMS = 0.01
"""Probability that a run with just another seed is rejected."""
_FEWEST_SEEDS = 3


@dataclass(frozen=True)
class Expected:
    """Curves of several seeds, all at the same steps."""

    metric: str
    steps: tuple[int, ...]
    curves: tuple[tuple[float, ...], ...]
    """One per seed."""


@dataclass(frozen=True)
class Point:
    """One step of a new run, with the interval its value must lie in."""

    step: int
    value: float
    low: float
    high: float

    @property
    def holds(self) -> bool:
        """Whether the value is in the interval; NaN is not."""
        return self.low <= self.value <= self.high


def collect(runs: Sequence[str], metric: str) -> Expected:
    """Read the curves of several seeds' runs; ConfigError if they do not fit together."""
    if len(runs) < _FEWEST_SEEDS:
        rule = f"{len(runs)} runs are too few to show how seeds differ"
        raise ConfigError([Problem("RUN", rule, f"give at least {_FEWEST_SEEDS}", has_value=False)])
    curves = [_curve(run, metric) for run in runs]
    steps = [tuple(curve) for curve in curves]
    for run, each in zip(runs, steps, strict=True):
        if each != steps[0]:
            rule = f"has {metric} at different steps than {runs[0]}"
            raise ConfigError([Problem("RUN", rule, "use the same evaluation.every_steps", run)])
    return Expected(metric, steps[0], tuple(tuple(curve.values()) for curve in curves))


def judge(run: str, expected: Expected) -> list[Point]:
    """Compare a run with the expectation at each of its steps."""
    curve = _curve(run, expected.metric)
    if missing := [step for step in expected.steps if step not in curve]:
        rule = f"has no {expected.metric} at step {missing[0]}, where the expected curve has one"
        raise ConfigError([Problem("RUN", rule, "run it like the expected runs", run)])
    columns = zip(*expected.curves, strict=True)
    return [
        Point(step, curve[step], *prediction_interval(column, len(expected.steps)))
        for step, column in zip(expected.steps, columns, strict=True)
    ]


def prediction_interval(values: Sequence[float], num_looks: int) -> tuple[float, float]:
    """Interval for one more value of the same kind, at a level that `num_looks` tests share."""
    quantile = _t_quantile(1 - FALSE_ALARMS / num_looks / 2, len(values) - 1)
    half = quantile * stdev(values) * math.sqrt(1 + 1 / len(values))
    return fmean(values) - half, fmean(values) + half


def write(expected: Expected, path: str) -> None:

    Path(path).write_text(json.dumps(asdict(expected)) + "\n")


def read(path: str) -> Expected:
    """Read a file that `write` made; ConfigError if it is not one."""
    try:
        found = read_json(Path(path))
        made = Expected(
            str(found["metric"]),
            tuple(int(step) for step in found["steps"]),
            tuple(tuple(float(value) for value in curve) for curve in found["curves"]),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        rule, remedy = f"cannot be read ({error})", "create one with verify curve RUN… --write FILE"
        raise ConfigError([Problem("--expected", rule, remedy, path)]) from None
    sizes = {len(curve) for curve in made.curves}
    if len(made.curves) < _FEWEST_SEEDS or sizes != {len(made.steps)} or not made.steps:
        rule = f"does not hold {_FEWEST_SEEDS} or more curves, each as long as its steps"
        raise ConfigError([Problem("--expected", rule, "create it again with --write", path)])
    return made


def _curve(run: str, metric: str) -> dict[int, float]:
    series = open_run(Path(run)).scalars().get(metric)
    if series is None or not len(series):
        remedy = "give --metric NAME, as `drivetrain report` shows it"
        raise ConfigError([Problem("RUN", f"has no {metric}", remedy, run)])
    return {int(s): float(v) for s, v in zip(series.steps, series.values, strict=True)}


@cache
def _t_quantile(level: float, degrees: int) -> float:
    """Quantile of Student's t, by bisection: a library for it would be needed by nothing else."""
    low, high = 0.0, 1e6
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_cdf(middle, degrees) < level else (low, middle)
    return high


def _t_cdf(x: float, degrees: int) -> float:
    """CDF for x ≥ 0, as a finite sum over the angle (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan(x / math.sqrt(degrees))
    is_odd = degrees % 2
    term = math.cos(angle) ** is_odd
    total = term if degrees > 1 else 0.0
    for power in range(is_odd + 2, degrees - 1, 2):
        term *= math.cos(angle) ** 2 * (power - 1) / power
        total += term
    inside = math.sin(angle) * total
    return 0.5 + (2 / math.pi * (angle + inside) if is_odd else inside) / 2
