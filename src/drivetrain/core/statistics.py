"""Medians of paired samples with confidence intervals. Pure functions."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class MedianInterval:
    """A median with its 95% bootstrap interval."""

    value: float
    low: float
    high: float


def paired_ratio(samples: Sequence[float], baseline: Sequence[float]) -> MedianInterval:
    """Return the median of sample / baseline over rounds; noise common to a round cancels."""
    return bootstrap([a / b for a, b in zip(samples, baseline, strict=True)])


def paired_difference(samples: Sequence[float], baseline: Sequence[float]) -> MedianInterval:
    """Return the median of sample - baseline over rounds."""
    return bootstrap([a - b for a, b in zip(samples, baseline, strict=True)])


def bootstrap(values: Sequence[float], resamples: int = 4000, seed: int = 0) -> MedianInterval:
    """Return the median, and the interval in which it falls in 95% of resamples."""
    draw = random.Random(seed)  # noqa: S311 - statistics, not secrets
    medians = sorted(median(draw.choices(values, k=len(values))) for _ in range(resamples))
    return MedianInterval(
        median(values), medians[int(0.025 * resamples)], medians[int(0.975 * resamples) - 1]
    )


def ratio_of_medians(
    samples: Sequence[float], baseline: Sequence[float], resamples: int = 4000, seed: int = 0
) -> MedianInterval:
    """Return the ratio of medians of unpaired samples; each side is resampled by itself."""
    draw = random.Random(seed)  # noqa: S311 - as above
    found = sorted(
        median(draw.choices(samples, k=len(samples)))
        / median(draw.choices(baseline, k=len(baseline)))
        for _ in range(resamples)
    )
    value = median(samples) / median(baseline)
    return MedianInterval(value, found[int(0.025 * resamples)], found[int(0.975 * resamples) - 1])
