"""Pulse: about once a second the ranks ask each other whether anybody wants something.

A signal reaches ranks at different moments, and a rank must not act on it alone: they agree at a
step all of them reach. One tiny all-reduce a second, not one a step; how many steps make a second
follows from the same reduced numbers, so every rank counts alike.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from drivetrain.parallel.world import World

SECONDS_BETWEEN = 1.0
_MOST_STEPS = 10_000


@dataclass(frozen=True)
class Wishes:
    """What at least one rank wants."""

    stop: bool = False
    save: bool = False
    step_s: float = 0.0
    """Rank 0's mean time of a step since the last pulse."""


class Pulse:
    """Counts steps to the next one."""

    def __init__(self, world: World, first_step: int) -> None:
        self._world = world
        self._last = first_step
        self._next = first_step + 1
        self._last_s = time.perf_counter()

    def at(self, step: int, *, stop: bool, save: bool) -> Wishes | None:
        """What the ranks want, at steps where they ask; None at the others."""
        if step < self._next:
            return None
        now_s = time.perf_counter()
        mean_s = (now_s - self._last_s) / max(1, step - self._last)
        mine = [float(stop), float(save), mean_s if self._world.is_main else 0.0]
        stops, saves, step_s = self._world.sum_floats(mine)
        self._last, self._last_s = step, time.perf_counter()
        self._next = step + max(1, min(_MOST_STEPS, int(SECONDS_BETWEEN / max(step_s, 1e-9))))
        return Wishes(stops > 0, saves > 0, step_s)
