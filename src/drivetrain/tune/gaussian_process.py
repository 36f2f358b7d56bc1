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
_LENGTHS = (0.2, 0.1, 0.4, 0.8)
_OF_CONTEXT = (2.0, 0.4)
_FORGETTING = (0.1, 0.0, 0.4)
_NOISE = (0.1, 0.3, 0.7)
"""Where the likelihood cannot tell, the first is taken: of one interval nobody knows how fast it is
forgotten, nor what the context means."""


@dataclass(frozen=True)
class Apart:
    """How far two sets of points are from each other, all with all.

    Points are rows: the time, a context that nobody chooses, then what is chosen, from 0 to 1.
    """

    times: Array
    contexts: Array
    squares: Array
    """Of the distance of what is chosen."""

    @classmethod
    def of(cls, these: Array, those: Array) -> Apart:
        """One row for each of these, one column for each of those."""
        between = np.abs(these[:, None, :] - those[None, :, :])
        return cls(between[..., 0], between[..., 1], (between[..., 2:] ** 2).sum(axis=2))


@dataclass(frozen=True)
class Kernel:
    """A squared exponential over values and context, fading with the time between two points.

    Targets have a variance of 1, of which `noise` is the part that the points do not explain.
    """

    length: float
    of_context: float
    """The context's own length."""
    forgetting: float
    """The ε of (1 - ε)^(|t - t'| / 2)."""
    noise: float

    def covariance(self, apart: Apart) -> Array:
        """Without the noise."""
        fading = (1.0 - self.forgetting) ** (apart.times / 2)
        far = apart.squares / self.length**2 + (apart.contexts / self.of_context) ** 2
        found: Array = (1.0 - self.noise) * fading * np.exp(-far / 2)
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
    kernels = starmap(Kernel, product(_LENGTHS, _OF_CONTEXT, _FORGETTING, _NOISE))
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
