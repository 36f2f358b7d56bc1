"""Perturb: a fork's values, from its donor's. Pure: its draws are hashes.

A population searches only keys that a run can change on resume. All others would mean a different
model, layout or order of samples, and the donor's state would not fit.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from drivetrain.core.errors import Problem
from drivetrain.tune.space import Choice, Float, Int, Parameter, Scalar, Space

MUTABLE = frozenset(
    f"optimization.{key}"
    for key in (
        "learning_rate",
        "lr_scheduler_type",
        "warmup_steps",
        "warmup_ratio",
        "decay_steps",
        "min_lr_ratio",
        "momentum",
        "weight_decay",
        "max_grad_norm",
    )
)
"""Keys that a resume takes from the config, once the change is accepted, not the checkpoint."""

_MEANS = {
    "optimization.optimizer": "the donor's optimizer state would not fit",
    "model": "the donor's weights would not fit",
    "precision": "the donor's numbers would have a different format",
    "parallel": "it decides the layout, not what is learned",
    "memory": "it decides the layout, not what is learned",
    "communication": "it decides the layout, not what is learned",
    "compile": "it decides the layout, not what is learned",
    "micro_batch_size": "it decides the layout, not what is learned",
    "data": "it decides the order of samples, and some would be used twice or never",
    "seed": "it decides the order of samples, and some would be used twice or never",
    "global_batch_size": "it decides the order of samples, and some would be used twice or never",
    "max_steps": "members would end at different steps",
    "num_train_epochs": "members would end at different steps",
    "evaluation": "members would be judged by different evaluations",
}
_MOST_TRIES = 100


def key_problems(space: Space) -> list[Problem]:
    """Problems for keys that a population cannot search."""
    remedy = "set it for all members, after the flags; a population can search " + ", ".join(
        sorted(key.partition(".")[2] for key in MUTABLE)
    )
    return [
        Problem(key, f"cannot change at a fork: {_meaning(key)}", remedy, has_value=False)
        for key in space.parameters
        if key not in MUTABLE
    ]


def _meaning(key: str) -> str:
    found = _MEANS.get(key) or _MEANS.get(key.partition(".")[0])
    return found or "a resume does not apply it, or it does not affect what is learned"


@dataclass(frozen=True)
class Rule:
    """How values are perturbed, and how often they are redrawn."""

    factors: tuple[float, float] = (0.8, 1.2)
    """A number is multiplied by one of the two; a choice moves one place down or up."""
    resample: float = 0.25
    """Probability that a value is drawn from its range instead."""


def perturbed(
    space: Space, values: Mapping[str, Scalar], rule: Rule, draw: str
) -> dict[str, Scalar]:
    """Perturb a donor's values; the same for the same `draw`, on any machine.

    Values that violate a constraint are redrawn; after a hundred tries they are the donor's.
    """
    for attempt in range(_MOST_TRIES):
        chance = chances(f"{draw}/{attempt}")
        found: dict[str, Scalar] = {}
        for key, parameter in space.parameters.items():
            if space.is_active(key, found):
                found[key] = _changed(parameter, values.get(key), rule, chance)
        if space.allows(found):
            return found
    return dict(values)


def chosen(number: int, draw: str) -> int:
    """A random index below `number`."""
    return int(next(chances(draw)) * number)


def chances(draw: str) -> Iterator[float]:
    """Numbers in [0, 1), from hashes: Python's generators may change between releases."""
    count = 0
    while True:
        digest = hashlib.sha256(f"{draw}/{count}".encode()).digest()
        yield int.from_bytes(digest[:6], "big") / 2**48
        count += 1


def _changed(parameter: Parameter, value: Scalar, rule: Rule, chance: Iterator[float]) -> Scalar:
    # always draw all three, even if unused, so that keys do not depend on each other
    anew, side, place = next(chance), next(chance), next(chance)
    is_up = side >= 0.5
    if isinstance(parameter, Choice):
        if anew < rule.resample or value not in parameter.values:
            return parameter.values[int(place * len(parameter.values))]
        return _neighbour(parameter.values, parameter.values.index(value), is_up=is_up)
    # a multiple of 0 is 0, so it is redrawn
    if anew < rule.resample or not isinstance(value, int | float) or value == 0:
        return at_place(parameter, place)
    wanted = value * rule.factors[is_up]
    if isinstance(parameter, Int) and _on_grid(parameter, wanted) == value:
        wanted = value + (parameter.step if wanted > value else -parameter.step)
    return _on_grid(parameter, wanted)


def _neighbour(values: tuple[Scalar, ...], index: int, *, is_up: bool) -> Scalar:
    other = index + (1 if is_up else -1)
    if not 0 <= other < len(values):
        other = 2 * index - other  # at an end there is only one direction
    return values[min(max(other, 0), len(values) - 1)]


def at_place(parameter: Float | Int, place: float) -> Scalar:
    """The value at a place from 0 (low) to 1 (high); logarithmic if the parameter is."""
    low, high = parameter.low, parameter.high
    if parameter.log:
        return _on_grid(parameter, math.exp(math.log(low) + place * math.log(high / low)))
    # integers are equally likely: the last one needs its own part of the range
    width = parameter.step if isinstance(parameter, Int) else 0
    return _on_grid(parameter, low + place * (high - low + width), down=bool(width))


def place_of(parameter: Float | Int, value: Scalar) -> float:
    """The place of a value in its range, from 0 to 1."""
    low, high = parameter.low, parameter.high
    if not isinstance(value, int | float) or low == high:
        return 0.5
    if parameter.log:
        return math.log(value / low) / math.log(high / low)
    return (value - low) / (high - low)


def _on_grid(parameter: Float | Int, wanted: float, *, down: bool = False) -> Scalar:
    """The nearest value in the range's steps (`down`: the next lower)."""
    low, high, step = parameter.low, parameter.high, parameter.step
    wanted = min(max(wanted, low), high)
    if step is not None:
        places = (wanted - low) / step
        most = math.floor((high - low) / step + 1e-9)
        wanted = low + min(math.floor(places) if down else round(places), most) * step
        wanted = min(wanted, high)
    return round(wanted) if isinstance(parameter, Int) else float(wanted)
