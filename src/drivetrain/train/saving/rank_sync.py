"""Pulse: about once a second the ranks ask each other whether anybody wants something.

A signal reaches ranks at different moments, and a rank must not act on it alone: they agree at a
step all of them reach. One tiny all-reduce a second, not one a step; how many steps make a second
follows from the same reduced numbers, so every rank counts alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from drivetrain.parallel.world import World

SECONDS_BETWEEN = 1.0
_MOST_STEPS = 10_000


@dataclass(frozen=True)
class SyncRequests:
    """What at least one rank wants."""

    finish: bool = False
    stop: bool = False
    save: bool = False
    step_s: float = 0.0
    """Rank 0's mean time of a step since the last pulse; 0 while it is not known."""


class RankSync:
    """Counts steps to the next one."""

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
        """Ranks that need not be at the same step ask where they meet anyway."""
        self._next = self._from(first_step + 1)

    def at(
        self, step: int, *, stop: bool, save: bool, finish: bool = False, is_time: bool = False
    ) -> SyncRequests | None:
        """What the ranks want, at steps where they ask; None at the others.

        `is_time`: all ranks know of something that asks for it now.
        """
        if step < self._next and not is_time:
            return None
        mean_s = self._mean_step_s() or 0.0
        mine = [float(finish), float(stop), float(save), mean_s if self._world.is_main else 0.0]
        finishes, stops, saves, step_s = self._world.sum_floats(mine)
        # a host that is ahead of its device asks again, until it knows
        steps = int(SECONDS_BETWEEN / step_s) if step_s else 1
        self._next = self._from(step + max(1, min(_MOST_STEPS, steps)))
        return SyncRequests(finishes > 0, stops > 0, saves > 0, step_s)

    def _from(self, step: int) -> int:
        """The first step, from this one on, at which they may."""
        return -(-step // self._multiple_of) * self._multiple_of
