"""Growth: a quantity as a function of micro-batch, sequence length and tensor-parallel ranks.

Every tensor of a forward or backward pass is a product of a batch size, a length (once, or twice in
attention that writes its scores down), and sizes of the model; a layer that `tp` ranks share has
1/tp of it. So a number of bytes, or of operations, is exactly

    c0 + c1·s + b·(x·s + y·s²),    each coefficient  u + v/tp

and a few traces at small sizes give it at any. `s` counts in lengths of the profile.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


class Size(NamedTuple):
    """Where a trace was taken."""

    batch: int
    length: float = 1.0
    tp: int = 1


@dataclass(frozen=True)
class Growth:
    """Coefficients (… × 4 × 2), for one number or for a whole series of them."""

    coefficients: Array

    def at(self, batch: float, length: float = 1.0, tp: int = 1) -> Array:
        """The values there."""
        basis = np.array([1.0, length, batch * length, batch * length * length])
        shares = np.array([1.0, 1.0 / tp])
        return np.asarray(np.einsum("...ij,i,j->...", self.coefficients, basis, shares))

    def one(self, batch: float, length: float = 1.0, tp: int = 1) -> float:
        """The value there, of a single number."""
        return float(self.at(batch, length, tp))


def fit(samples: Mapping[Size, Array]) -> Growth:
    """Through two batches, at one length or two, with one or two numbers of tp ranks.

    With one length a quantity is taken to grow in proportion to it; with one number of ranks, not
    to depend on it.
    """
    by_tp: dict[int, Array] = {}
    for tp in {size.tp for size in samples}:
        by_tp[tp] = _over_batch_and_length({s: v for s, v in samples.items() if s.tp == tp})
    if len(by_tp) == 1:
        only = next(iter(by_tp.values()))
        return Growth(np.stack([only, np.zeros_like(only)], axis=-1))
    (low, at_low), (high, at_high) = sorted(by_tp.items())
    shared = (at_low - at_high) / (1 / low - 1 / high)
    return Growth(np.stack([at_low - shared / low, shared], axis=-1))


def _over_batch_and_length(samples: Mapping[Size, Array]) -> Array:
    lengths = sorted({size.length for size in samples}, reverse=True)
    rows = {length: _over_batch(samples, length) for length in lengths}
    constant, slope = rows[lengths[0]]
    zero = np.zeros_like(constant)
    if len(lengths) == 1:
        return np.stack([constant, zero, slope, zero], axis=-1)
    short = lengths[1]
    constant_short, slope_short = rows[short]
    # slope(s) = x·s + y·s², constant(s) = c0 + c1·s, known at s = 1 and s = short
    y = (slope_short / short - slope) / (short - 1.0)
    per_length = (constant - constant_short) / (1.0 - short)
    return np.stack([constant - per_length, per_length, slope - y, y], axis=-1)


def _over_batch(samples: Mapping[Size, Array], length: float) -> tuple[Array, Array]:
    at = {size.batch: value for size, value in samples.items() if size.length == length}
    (low, at_low), (high, at_high) = sorted(at.items())
    slope = (at_high - at_low) / (high - low)
    return at_low - low * slope, slope
