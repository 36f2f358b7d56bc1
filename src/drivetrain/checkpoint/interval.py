"""How often to save: the interval that loses the least time, after Young and Daly.

Frequent saves cost time at every save; rare saves cost repeated work at every failure. If a save
costs C seconds and a failure happens every M seconds, the best interval is near √(2·C·M).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from drivetrain.core.text import counted

# The failure rate of a run that has not failed yet is unknown: published large runs failed every
# few hours.
PRIOR_BETWEEN_FAILURES_S = 4 * 3600.0
MOST_BETWEEN_SAVES_S = 1800.0


@dataclass(frozen=True)
class Interval:
    """The steps between saves, and the reason."""

    steps: int
    why: str


def best_interval(
    save_s: float, step_s: float, num_failures: int, running_s: float, beside_s: float = 0.0
) -> Interval:
    """Return the number of steps between saves.

    `save_s` is how long a save blocks the steps, `beside_s` how long it runs beside them; a save
    should finish well before the next one starts.
    """
    between_s = (PRIOR_BETWEEN_FAILURES_S + running_s) / (1 + num_failures)
    cost_s = max(save_s, 1e-3)
    wanted_s = min(math.sqrt(2 * cost_s * between_s), MOST_BETWEEN_SAVES_S)
    wanted_s = max(wanted_s, 2 * beside_s)
    steps = max(1, round(wanted_s / max(step_s, 1e-6)))
    return Interval(
        steps,
        f"√(2 × {cost_s * 1e3:.0f} ms a save × {_duration(between_s)} between failures) = "
        f"{wanted_s:.0f} s = {counted(steps, 'step')} of {step_s * 1e3:.1f} ms "
        f"({counted(num_failures, 'failure')} in {_duration(running_s)} so far)",
    )


def _duration(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds:.0f} s"
