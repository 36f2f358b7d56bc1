"""Timetable: at which step a run saves next; the same on every rank, except for failures."""

from __future__ import annotations

import time
from typing import Literal

from drivetrain.checkpoint.checkpointer import Saved
from drivetrain.checkpoint.interval import Interval, best_interval
from drivetrain.parallel.world import World

_RETRY_AFTER_S = 10.0


class Timetable:
    """Schedules saves; `every` is checkpoint.every_steps."""

    def __init__(self, every: int | Literal["auto"] | None, world: World) -> None:
        self._every = every
        self._world = world
        self._next: int | None = None
        self._save_s, self._beside_s = 0.0, 0.0
        self._failed_at_s: float | None = None

    def begin(self, step: int) -> None:
        """Schedule saves at multiples of the interval, wherever the run resumed."""
        self.settle_next(step)

    def is_due(self, step: int) -> bool:
        """True at or after the scheduled step: a live replica may have been healed past it."""
        return self._next is not None and step >= self._next

    def settle_next(self, step: int) -> None:
        """Schedule the next multiple; with `auto`, the next exchange of the ranks decides."""
        every = self._every
        self._next = step - step % every + every if isinstance(every, int) else None

    @property
    def wants_interval(self) -> bool:
        """True if the next exchange of the ranks must choose the interval."""
        return self._every == "auto" and self._next is None

    def choose_interval(
        self, step: int, step_s: float, failures: tuple[float, float]
    ) -> Interval | None:
        """Schedule the next save from rank 0's figures; None until a save has shown its cost.

        `failures`: their number, and the seconds of running time. A collective call.
        """
        facts = [0.0] * 4
        if self._world.is_main:
            facts = [self._save_s, self._beside_s, *failures]
        save_s, beside_s, num_failures, running_s = self._world.sum_floats(facts)
        interval = best_interval(save_s, step_s, int(num_failures), running_s, beside_s)
        # the first save is early: it shows what a save costs, and that saving works
        steps = interval.steps if save_s else min(interval.steps, max(10, int(2 / step_s)))
        self._next = step + steps
        return interval if save_s else None

    def note(self, saved: Saved) -> None:
        """Note the cost of a save, or its failure."""
        if saved.problem:
            self._failed_at_s = time.perf_counter()
        else:
            self._save_s, self._beside_s = saved.blocked_s, saved.beside_s

    def forgive(self) -> None:
        """Forget a failed save, because a later one makes up for it."""
        self._failed_at_s = None

    @property
    def has_failed(self) -> bool:
        """True if this rank's part of the last save failed."""
        return self._failed_at_s is not None

    @property
    def wants_retry(self) -> bool:
        """True some time after a failure."""
        failed_s = self._failed_at_s
        return failed_s is not None and time.perf_counter() - failed_s > _RETRY_AFTER_S
