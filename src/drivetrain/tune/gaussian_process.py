"""A Gaussian process that forgets: its posterior, and its kernel by the marginal likelihood. Pure.

numpy alone, which the core has. scikit-learn would need a kernel class for the time as well, which
is most of what is here.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product, starmap

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
_LENGTHS = (0.2, 0.1, 0.4, 0.8, 1.6)
_FORGETTING = (0.1, 0.0, 0.4)
_NOISE = (0.1, 0.01, 0.3, 0.7)
"""Where the likelihood cannot tell, the first is taken: of one interval nobody knows how fast it is
forgotten."""


@dataclass(frozen=True)
class Apart:
    """How far two sets of points are from each other, all with all.

    Points are rows: the time, then coordinates from 0 to 1.
    """

    times: Array
    squares: Array

    @classmethod
    def of(cls, these: Array, those: Array) -> Apart:
        """One row for each of these, one column for each of those."""
        times = np.abs(these[:, None, 0] - those[None, :, 0])
        return cls(times, ((these[:, None, 1:] - those[None, :, 1:]) ** 2).sum(axis=2))


@dataclass(frozen=True)
class Kernel:
    """A squared exponential over the values, fading with the time between two points.

    Targets have a variance of 1, of which `noise` is the part that the points do not explain.
    """

    length: float
    forgetting: float
    """The ε of (1 - ε)^(|t - t'| / 2)."""
    noise: float

    def covariance(self, apart: Apart) -> Array:
        """Without the noise."""
        fading = (1.0 - self.forgetting) ** (apart.times / 2)
        found: Array = (1.0 - self.noise) * fading * np.exp(-apart.squares / 2 / self.length**2)
        return found

    def root(self, apart: Apart) -> Array:
        """The Cholesky factor of what is observed; the noise keeps it positive definite."""
        covariance = self.covariance(apart) + self.noise * np.eye(len(apart.times))
        return np.linalg.cholesky(covariance).astype(np.float64, copy=False)

    def log_likelihood(self, apart: Apart, targets: Array) -> float:
        """Of the targets, but for a constant."""
        root = self.root(apart)
        white = np.linalg.solve(root, targets)
        return float(-0.5 * white @ white - np.log(np.diag(root)).sum())


def fitted(points: Array, targets: Array) -> Kernel:
    """The likeliest of a grid of kernels: an optimizer would have its last bits in the result."""
    apart = Apart.of(points, points)
    kernels = starmap(Kernel, product(_LENGTHS, _FORGETTING, _NOISE))
    return max(kernels, key=lambda each: each.log_likelihood(apart, targets))


def mean(kernel: Kernel, points: Array, targets: Array, at: Array) -> Array:
    """What is expected at other points."""
    root = kernel.root(Apart.of(points, points))
    weights = np.linalg.solve(root.T, np.linalg.solve(root, targets))
    found: Array = kernel.covariance(Apart.of(at, points)) @ weights
    return found


def deviation(kernel: Kernel, points: Array, at: Array) -> Array:
    """How far off that may be. It depends on where was looked, not on what was seen there."""
    root = kernel.root(Apart.of(points, points))
    white = np.linalg.solve(root, kernel.covariance(Apart.of(points, at)))
    found: Array = np.sqrt(np.maximum(1.0 - kernel.noise - (white**2).sum(axis=0), 0.0))
    return found
