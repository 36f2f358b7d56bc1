"""A Gaussian process that forgets: its posterior, and its kernel by the marginal likelihood. Pure.

It needs only numpy, which the core has. scikit-learn would also need a kernel class for the time,
which is most of this file.
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
"""If the likelihoods are equal, the first is taken: a single interval does not show how fast it is
forgotten, nor what the context means."""


@dataclass(frozen=True)
class Apart:
    """Pairwise distances between two sets of points.

    Points are rows: the time, a context that is not chosen, then the chosen values, from 0 to 1.
    """

    times: Array
    contexts: Array
    squares: Array
    """Squared distances of the chosen values."""

    @classmethod
    def of(cls, these: Array, those: Array) -> Apart:
        """One row per point of `these`, one column per point of `those`."""
        between = np.abs(these[:, None, :] - those[None, :, :])
        return cls(between[..., 0], between[..., 1], (between[..., 2:] ** 2).sum(axis=2))


@dataclass(frozen=True)
class Kernel:
    """A squared exponential over values and context, fading with the time between two points.

    Targets have variance 1, of which `noise` is the part that the points do not explain.
    """

    length: float
    of_context: float
    """Length scale of the context."""
    forgetting: float
    """The ε of (1 - ε)^(|t - t'| / 2)."""
    noise: float

    def covariance(self, apart: Apart) -> Array:
        """Covariance without the noise."""
        fading = (1.0 - self.forgetting) ** (apart.times / 2)
        far = apart.squares / self.length**2 + (apart.contexts / self.of_context) ** 2
        found: Array = (1.0 - self.noise) * fading * np.exp(-far / 2)
        return found

    def root(self, apart: Apart) -> Array:
        """Cholesky factor of the observations' covariance, positive definite due to the noise."""
        covariance = self.covariance(apart) + self.noise * np.eye(len(apart.times))
        return np.linalg.cholesky(covariance).astype(np.float64, copy=False)

    def log_likelihood(self, apart: Apart, targets: Array) -> float:
        """Log-likelihood of the targets, up to a constant."""
        root = self.root(apart)
        white = np.linalg.solve(root, targets)
        return float(-0.5 * white @ white - np.log(np.diag(root)).sum())


def fitted(points: Array, targets: Array) -> Kernel:
    """The likeliest of a grid of kernels: an optimizer's last bits would affect the result."""
    apart = Apart.of(points, points)
    kernels = starmap(Kernel, product(_LENGTHS, _OF_CONTEXT, _FORGETTING, _NOISE))
    return max(kernels, key=lambda each: each.log_likelihood(apart, targets))


def mean(kernel: Kernel, points: Array, targets: Array, at: Array) -> Array:
    """Posterior mean at other points."""
    root = kernel.root(Apart.of(points, points))
    weights = np.linalg.solve(root.T, np.linalg.solve(root, targets))
    found: Array = kernel.covariance(Apart.of(at, points)) @ weights
    return found


def deviation(kernel: Kernel, points: Array, at: Array) -> Array:
    """Posterior standard deviation; it depends on the observed points, not on their targets."""
    root = kernel.root(Apart.of(points, points))
    white = np.linalg.solve(root, kernel.covariance(Apart.of(points, at)))
    found: Array = np.sqrt(np.maximum(1.0 - kernel.noise - (white**2).sum(axis=0), 0.0))
    return found
