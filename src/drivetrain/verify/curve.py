"""`verify curve`: does a new run learn as earlier runs of other seeds did?

The expectation is a file with one curve per seed. At each of its steps the new run's value must lie
within the prediction interval of the seeds' values, mean ± t · s · √(1 + 1/n), at a level that all
steps share (Bonferroni): a run that is one more seed is refused once in a hundred times. The file
also has the steps, so a run that evaluates elsewhere is told so and not interpolated.
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
"""How often one more seed would be refused."""
_FEWEST_SEEDS = 3


@dataclass(frozen=True)
class Expected:
    """Curves of some seeds, all at the same steps."""

    metric: str
    steps: tuple[int, ...]
    curves: tuple[tuple[float, ...], ...]
    """By seed."""


@dataclass(frozen=True)
class Point:
    """One step of a new run, and between which values it was to lie."""

    step: int
    value: float
    low: float
    high: float

    @property
    def holds(self) -> bool:
        """NaN does not."""
        return self.low <= self.value <= self.high


def collect(runs: Sequence[str], metric: str) -> Expected:
    """From runs of several seeds; ConfigError where they do not fit together."""
    if len(runs) < _FEWEST_SEEDS:
        rule = f"{len(runs)} runs say too little of how seeds differ"
        raise ConfigError([Problem("RUN", rule, f"at least {_FEWEST_SEEDS}", has_value=False)])
    curves = [_curve(run, metric) for run in runs]
    steps = [tuple(curve) for curve in curves]
    for run, each in zip(runs, steps, strict=True):
        if each != steps[0]:
            rule = f"has {metric} at other steps than {runs[0]}"
            raise ConfigError([Problem("RUN", rule, "the same evaluation.every_steps", run)])
    return Expected(metric, steps[0], tuple(tuple(curve.values()) for curve in curves))


def judge(run: str, expected: Expected) -> list[Point]:
    """Every step of the expectation."""
    curve = _curve(run, expected.metric)
    if missing := [step for step in expected.steps if step not in curve]:
        rule = f"has no {expected.metric} at step {missing[0]}, where the expectation has one"
        raise ConfigError([Problem("RUN", rule, "run it as the expected runs were", run)])
    columns = zip(*expected.curves, strict=True)
    return [
        Point(step, curve[step], *prediction_interval(column, len(expected.steps)))
        for step, column in zip(expected.steps, columns, strict=True)
    ]


def prediction_interval(values: Sequence[float], num_looks: int) -> tuple[float, float]:
    """Where one more value of the same kind lies, at a level that several looks share."""
    quantile = _t_quantile(1 - FALSE_ALARMS / num_looks / 2, len(values) - 1)
    half = quantile * stdev(values) * math.sqrt(1 + 1 / len(values))
    return fmean(values) - half, fmean(values) + half


def write(expected: Expected, path: str) -> None:
    """For `read`."""
    Path(path).write_text(json.dumps(asdict(expected)) + "\n")


def read(path: str) -> Expected:
    """ConfigError where a file is none of ours."""
    try:
        found = read_json(Path(path))
        made = Expected(
            str(found["metric"]),
            tuple(int(step) for step in found["steps"]),
            tuple(tuple(float(value) for value in curve) for curve in found["curves"]),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        rule, remedy = f"cannot be read ({error})", "make one: verify curve RUN… --write FILE"
        raise ConfigError([Problem("--expected", rule, remedy, path)]) from None
    sizes = {len(curve) for curve in made.curves}
    if len(made.curves) < _FEWEST_SEEDS or sizes != {len(made.steps)} or not made.steps:
        rule = f"is not {_FEWEST_SEEDS} or more curves, each as long as its steps"
        raise ConfigError([Problem("--expected", rule, "make it anew with --write", path)])
    return made


def _curve(run: str, metric: str) -> dict[int, float]:
    series = open_run(Path(run)).scalars().get(metric)
    if series is None or not len(series):
        remedy = "--metric NAME, as `drivetrain report` has it"
        raise ConfigError([Problem("RUN", f"has no {metric}", remedy, run)])
    return {int(s): float(v) for s, v in zip(series.steps, series.values, strict=True)}


@cache
def _t_quantile(level: float, degrees: int) -> float:
    """Student's t, by bisection: its quantile needs a library that nothing else here does."""
    low, high = 0.0, 1e6
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_cdf(middle, degrees) < level else (low, middle)
    return high


def _t_cdf(x: float, degrees: int) -> float:
    """For x ≥ 0: a finite sum over the angle (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan(x / math.sqrt(degrees))
    is_odd = degrees % 2
    term = math.cos(angle) ** is_odd
    total = term if degrees > 1 else 0.0
    for power in range(is_odd + 2, degrees - 1, 2):
        term *= math.cos(angle) ** 2 * (power - 1) / power
        total += term
    inside = math.sin(angle) * total
    return 0.5 + (2 / math.pi * (angle + inside) if is_odd else inside) / 2
