"""Ten minutes in all: who may still begin, and how long it may take. Pure."""

from __future__ import annotations

from dataclasses import dataclass

TOTAL_S = 600.0
ENDING_S = 20.0
"""Kept back: imports at the start, ending what hangs, and the report."""


@dataclass(frozen=True)
class Times:
    """What a check takes."""

    least_s: float
    """With less it would not get anywhere."""
    limit_s: float
    """With more something hangs."""


def share(times: Times, used_s: float, total_s: float = TOTAL_S) -> float | None:
    """Seconds a check may take now; None when it no longer fits."""
    left_s = total_s - ENDING_S - used_s
    return min(times.limit_s, left_s) if left_s >= times.least_s else None
