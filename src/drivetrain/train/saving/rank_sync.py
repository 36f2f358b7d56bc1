"""RankSync: about once a second the ranks exchange their requests (stop, save, finish).

A signal reaches ranks at different times, and a rank must not act on it alone: all ranks agree at a
step that each of them reaches. This takes one small all-reduce per second, not per step. The number
of steps per second is derived from the same reduced numbers, so it is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from drivetrain.parallel.world import World

SECONDS_BETWEEN = 1.0
_MOST_STEPS = 10_000


@dataclass(frozen=True)
class SyncRequests:
    """Requests of at least one rank."""

    finish: bool = False
    stop: bool = False
    save: bool = False
    step_s: float = 0.0
    """Rank 0's mean step time since the last exchange; 0 if unknown."""


class RankSync:
    """Decides at which steps the ranks exchange requests."""

    def __init__(
        self,
        world: World,
        first_step: int,
        mean_step_s: Callable[[], float | None],
        multiple_of: int = 1,
    ) -> None:
        self._world = world
        self._mean_step_s = mean_step_s
        self._multiple_of = multiple_of
        """Ranks that may be at different steps exchange only at steps where they synchronize."""
        self._next = self._from(first_step + 1)

    def at(
        self, step: int, *, stop: bool, save: bool, finish: bool = False, is_time: bool = False
    ) -> SyncRequests | None:
        """Return the ranks' requests at steps with an exchange, None at others.

        `is_time`: all ranks know that an exchange is due now.
        """
        if step < self._next and not is_time:
            return None
        mean_s = self._mean_step_s() or 0.0
        mine = [float(finish), float(stop), float(save), mean_s if self._world.is_main else 0.0]
        finishes, stops, saves, step_s = self._world.sum_floats(mine)
        # a host that is ahead of its device exchanges again until it knows the step time
        steps = int(SECONDS_BETWEEN / step_s) if step_s else 1
        self._next = self._from(step + max(1, min(_MOST_STEPS, steps)))
        return SyncRequests(finishes > 0, stops > 0, saves > 0, step_s)

    def _from(self, step: int) -> int:
        """Return the first allowed step from this one on."""
        return -(-step // self._multiple_of) * self._multiple_of
