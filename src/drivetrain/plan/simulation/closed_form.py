"""What can be said without simulating: Young's and Daly's formulas, for independent failures."""

from __future__ import annotations

import math


def best_interval_s(save_s: float, mtbf_s: float) -> float:
    """Daly's optimum: running time between two saves.

    J. Daly, A higher order estimate of the optimum checkpoint interval (2006), equation 37.
    """
    if save_s <= 0:
        return mtbf_s / 100  # saving is free: often enough
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = save_s / (2 * mtbf_s)
    return math.sqrt(2 * save_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s


def expected_goodput(interval_s: float, save_s: float, down_s: float, mtbf_s: float) -> float:
    """Useful time over elapsed time when everything restarts after each failure.

    Exact for exponential failures, which may also strike while the run is coming back.
    """
    per_interval_s = mtbf_s * math.exp(down_s / mtbf_s) * math.expm1((interval_s + save_s) / mtbf_s)
    return interval_s / per_interval_s
