"""From small models to a large one: the best value of a parameter as a power of the size. Pure.

At each size the trials of a study give the parameter's optimum. A power law, a line in logarithms,
is fitted to the optima over the sizes, and predicts the optimum at a size that was not searched.
The largest size, predicted from the others, shows how far that can be trusted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

FEWEST_TRIALS, FEWEST_SIZES = 5, 3
_NEAREST = 2 / 3
"""Fraction of a study's trials, the best ones, that the parabola is fitted to: near the optimum the
loss is flat and noisy, so the slopes on both sides say more; far away it is not a parabola."""


@dataclass(frozen=True)
class Optimum:
    """The best value of a parameter at one size."""

    size: float
    value: float
    loss: float
    """Loss at the optimum, by the parabola."""
    num_trials: int
    is_at_edge: bool
    """No trial lies beyond it: the true optimum may be outside the searched range."""


@dataclass(frozen=True)
class PowerLaw:
    """value = factor × size ** exponent."""

    factor: float
    exponent: float

    def at(self, size: float) -> float:
        return float(self.factor * size**self.exponent)


def optimum(size: float, trials: Sequence[tuple[float, float]]) -> Optimum:
    """The optimum from the (value, loss) of trials: the minimum of a parabola in log(value).

    The parabola is fitted to the better part of the trials. If it has no minimum between them, the
    optimum is the best trial.
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
    """Fit a power law by least squares in logarithms."""
    sizes, values = (np.log([getattr(o, name) for o in optima]) for name in ("size", "value"))
    exponent, constant = np.polyfit(sizes, values, 1)
    return PowerLaw(math.exp(constant), float(exponent))


def held_out(optima: Sequence[Optimum]) -> tuple[Optimum, float]:
    """The optimum at the largest size, and the value that the others predict for it."""
    *others, largest = sorted(optima, key=lambda each: each.size)
    return largest, fit(others).at(largest.size)


def factor_off(found: float, predicted: float) -> float:
    """The factor by which `predicted` is too large or too small; at least 1."""
    return math.exp(abs(math.log(predicted / found)))
