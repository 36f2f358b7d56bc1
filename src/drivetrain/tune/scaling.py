"""From small models to a large one: where a parameter is best, as a power of the size. Pure.

At each size the trials of a study say where the parameter is best; over the sizes those optima are
fitted by a power law, a line in logarithms, which says where it would be best at a size that nobody
has searched. How far that can be trusted is seen on the largest size, predicted from the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

FEWEST_TRIALS, FEWEST_SIZES = 5, 3
_NEAREST = 2 / 3
"""The part of a study's trials, the best ones, that the optimum is read from: near it the loss is
flat and noisy, so that the slopes on both sides say more; far away it is no parabola."""


@dataclass(frozen=True)
class Optimum:
    """Where a parameter is best at one size."""

    size: float
    value: float
    loss: float
    """There, by the parabola."""
    num_trials: int
    is_at_edge: bool
    """No trial lies on its other side: it may be beyond what was searched."""


@dataclass(frozen=True)
class PowerLaw:
    """value = factor × size ** exponent."""

    factor: float
    exponent: float

    def at(self, size: float) -> float:
        return float(self.factor * size**self.exponent)


def optimum(size: float, trials: Sequence[tuple[float, float]]) -> Optimum:
    """Of (value, loss) of its trials: the lowest point of a parabola in log(value).

    Through the better part of them. Where that has no lowest point between them, the best trial.
    """
    better = sorted(trials, key=lambda each: each[1])
    better = better[: max(FEWEST_TRIALS, math.ceil(_NEAREST * len(better)))]
    at = np.log([value for value, _ in better])
    losses = np.array([loss for _, loss in better])
    best, low, high = float(at[0]), float(at.min()), float(at.max())
    square, slope, _ = curve = np.polyfit(at - best, losses, 2)
    offset = -slope / (2 * square) if square > 0 else math.inf
    if not low < best + offset < high:
        every = [math.log(value) for value, _ in trials]
        is_at_edge = best in (min(every), max(every))
        return Optimum(size, math.exp(best), better[0][1], len(trials), is_at_edge)
    loss = float(np.polyval(curve, offset))
    return Optimum(size, math.exp(best + offset), loss, len(trials), is_at_edge=False)


def fit(optima: Sequence[Optimum]) -> PowerLaw:
    """By least squares in logarithms."""
    sizes, values = (np.log([getattr(o, name) for o in optima]) for name in ("size", "value"))
    exponent, constant = np.polyfit(sizes, values, 1)
    return PowerLaw(math.exp(constant), float(exponent))


def held_out(optima: Sequence[Optimum]) -> tuple[Optimum, float]:
    """The largest size, and what the others predict for it."""
    *others, largest = sorted(optima, key=lambda each: each.size)
    return largest, fit(others).at(largest.size)


def factor_off(found: float, predicted: float) -> float:
    """How many times too large or too small; at least 1."""
    return math.exp(abs(math.log(predicted / found)))
