"""Samplers whose values follow from the trial's number alone: `grid` and `qmc`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from drivetrain.core.errors import ConfigError, Problem
from drivetrain.core.requirements import require
from drivetrain.tune.space import Choice, Int, Parameter, Scalar, Space

SAMPLERS = ("grid", "qmc")
_MOST_COMBINATIONS = 100_000
_MOST_REFUSED = 1_000
Values = dict[str, Scalar]


class Points:
    """The values of every trial, generated on demand."""

    def __init__(self, space: Space, sampler: str, seed: int) -> None:
        self._coming = iter(grid(space)) if sampler == "grid" else qmc(space, seed)
        self._made: list[Values] = []

    def __getitem__(self, trial: int) -> Values:
        self._made += itertools.islice(self._coming, max(0, trial + 1 - len(self._made)))
        return self._made[trial]


def grid(space: Space) -> list[Values]:
    """Every combination that the space allows, the last key changing fastest."""
    if ranges := [key for key, each in space.parameters.items() if _has_no_end(each)]:
        rule = "a grid needs a finite number of values, and a range without a step has none"
        remedy = "add step: …, list the values, or use --sampler qmc"
        raise ConfigError([Problem(key, rule, remedy, has_value=False) for key in ranges])
    if (size := math.prod(map(_num_values, space.parameters.values()))) > _MOST_COMBINATIONS:
        rule = f"a grid of {size:,} combinations is too large"
        remedy = "use fewer values, a wider step, or --sampler qmc"
        raise ConfigError([Problem("--sampler", rule, remedy, "grid")])
    columns = {
        key: [_value(each, index) for index in range(_num_values(each))]
        for key, each in space.parameters.items()
    }
    found = []
    seen: set[tuple[tuple[str, Scalar], ...]] = set()
    for combination in itertools.product(*columns.values()):
        values = _active(space, dict(zip(columns, combination, strict=True)))
        # a key that is inactive does not make a second combination
        if tuple(values.items()) not in seen and space.allows(values):
            seen.add(tuple(values.items()))
            found.append(values)
    return found


def _has_no_end(parameter: Parameter) -> bool:
    return not isinstance(parameter, Choice) and (parameter.log or parameter.step is None)


def _num_values(parameter: Parameter) -> int:
    if isinstance(parameter, Choice):
        return len(parameter.values)
    return int((parameter.high - parameter.low) / (parameter.step or 1) + 1e-9) + 1


def _value(parameter: Parameter, index: int) -> Scalar:
    if isinstance(parameter, Choice):
        return parameter.values[index]
    value = parameter.low + index * (parameter.step or 1)
    # 0.1 three times is not 0.3
    return int(value) if isinstance(parameter, Int) else round(value, 12)


def qmc(space: Space, seed: int) -> Iterator[Values]:
    """Points of a scrambled Sobol sequence, which covers the space evenly."""
    module = require("scipy.stats.qmc", extra="tune")
    sequence = module.Sobol(len(space.parameters), scramble=True, seed=seed)
    num_refused = 0
    while num_refused < _MOST_REFUSED:
        for point in sequence.random(64):
            pairs = zip(space.parameters.items(), point, strict=True)
            values = _active(space, {key: _at(each, float(u)) for (key, each), u in pairs})
            num_refused = 0 if space.allows(values) else num_refused + 1
            if not num_refused:
                yield values
    rule = f"{num_refused} points in a row violate them"
    remedy, shown = "loosen them, or narrow the ranges", "; ".join(space.constraints)
    raise ConfigError([Problem("constraints", rule, remedy, shown)])


def _at(parameter: Parameter, u: float) -> Scalar:
    """The value at fraction `u` of a parameter's range, 0 ≤ u < 1."""
    if isinstance(parameter, Choice) or not _has_no_end(parameter):
        return _value(parameter, int(u * _num_values(parameter)))
    low, high = parameter.low, parameter.high
    value = low * (high / low) ** u if parameter.log else low + u * (high - low)
    return min(int(value + 0.5), int(high)) if isinstance(parameter, Int) else value


def _active(space: Space, values: Values) -> Values:
    """Without the keys whose `when` does not hold."""
    found: Values = {}
    for key, value in values.items():
        if space.is_active(key, found):
            found[key] = value
    return found
