"""StepTimer: marks the moments of a step and records the step once their times are known.

On the CPU that is immediate. On an accelerator the host is steps ahead: its marks are read, in
order, when the device has reached them, and never waited for before the run ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from time import perf_counter, sleep

from drivetrain.parallel.clock import Clock, Moment, Stretch, Waiting
from drivetrain.record.recorder import Recorder
from drivetrain.record.step_file import COMPILES, HOST_TIMED, StepTimes

_FIRST_STEPS = 32
"""Enough to compare a run with its plan."""
_LAST_CHANCE_S = 0.5
"""Enough for a completed step; a device stuck in a collective is not waited for."""


@dataclass(slots=True)
class _Step:
    """The marks of one step."""

    began: Moment
    data: list[Stretch]
    optimizing: Moment = None
    ended: Moment = None
    in_backward: Sequence[Stretch] = ()
    """Time waiting for other ranks."""
    in_optimizer: Sequence[Stretch] = ()
    held: Sequence[Stretch] = ()
    """Time in the optimizer step in which the weights waited for a copy of them."""
    saving: Sequence[Stretch] = ()
    done: Moment = None
    """End of the step, including the work after it (logging, evaluation)."""
    number: int = 0
    flags: int = 0

    def times(self, clock: Clock) -> StepTimes:
        """Return the seconds of each phase; they add up to the whole step."""
        seconds = clock.seconds
        data_s = _total(seconds, self.data)
        in_backward_s = _total(seconds, self.in_backward) if self.in_backward else 0.0
        in_optimizer_s = _total(seconds, self.in_optimizer) if self.in_optimizer else 0.0
        held_s = _total(seconds, self.held) if self.held else 0.0
        saving_s = _total(seconds, self.saving) if self.saving else 0.0
        return StepTimes(
            self.number,
            clock.host_s(self.began),
            data_s,
            seconds(self.began, self.optimizing) - data_s - in_backward_s,  # compute_s
            in_backward_s + in_optimizer_s,  # communication_s
            seconds(self.optimizing, self.ended) - in_optimizer_s - held_s,  # optimizer_s
            held_s + saving_s,  # checkpoint_s
            seconds(self.ended, self.done) - saving_s,  # other_s
            self.flags,
        )


def _total(seconds: Callable[[Moment, Moment], float], stretches: Sequence[Stretch]) -> float:
    return sum(seconds(start, end) for start, end in stretches)


class StepTimer:
    """Times one rank's steps. Every loop marks the same moments in the same order."""

    def __init__(self, clock: Clock, waiting: Waiting) -> None:
        self.clock = clock
        self.now = clock.now
        self.recorder: Recorder | None = None
        """Records the steps; set once the run has a recorder."""
        self._waiting = waiting
        self._step = _Step(None, [])
        self._no_flags = 0 if clock.is_true else HOST_TIMED
        self._flags = self._no_flags
        self._held: list[Stretch] = []
        self._saving: list[Stretch] = []
        self._open: deque[_Step] = deque()
        self._seconds, self._num_steps = 0.0, 0
        self.first_s: list[float] = []
        """Seconds of the first steps, without the work between them."""

    def begin(self) -> None:
        """Mark the beginning of a step."""
        self._waiting.take()  # what came before this step was not its waiting
        self._waiting.is_in_step = True
        self._step = _Step(self.now(), [])

    def waited_for_data(self, asked: Moment) -> None:
        """Mark the arrival of a batch that was requested at `asked`."""
        self._step.data.append((asked, self.now()))

    def optimizing(self) -> None:
        """Mark the end of backward."""
        self._step.optimizing = self.now()
        self._step.in_backward = self._waiting.take()

    def ended(self) -> None:
        """Mark the end of the optimizer step."""
        step = self._step
        step.ended = self.now()
        step.in_optimizer = self._waiting.take()
        self._waiting.is_in_step = False
        if self._held:
            step.held, self._held = self._held, []

    def held(self, since: Moment) -> None:
        """Note that the weights waited since that moment, because they were being copied."""
        self._held.append((since, self.now()))

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Context of a save that blocks the steps."""
        began = self.now()
        try:
            yield
        finally:
            self._saving.append((began, self.now()))

    def compiled(self) -> None:
        """Note that torch compiled in the current step, or since the last one."""
        self._flags |= COMPILES

    def done(self, number: int) -> None:
        """Mark the end of the run's `number`-th step (from 1) and all work that belongs to it."""
        step = self._step
        step.done, step.number = self.now(), number
        step.flags, self._flags = self._flags, self._no_flags
        if self._saving:
            step.saving, self._saving = self._saving, []
        self._open.append(step)
        self.settle()

    def settle(self) -> None:
        """Record the steps whose times are known."""
        while self._open and self.clock.is_reached(self._open[0].done):
            times = self._open.popleft().times(self.clock)
            self._seconds += sum(times[2:-1])
            self._num_steps += 1
            if len(self.first_s) < _FIRST_STEPS:
                self.first_s.append(sum(times[2:6]))
            if self.recorder is not None:
                self.recorder.step(times)

    def caught_up(self) -> None:
        """Record all steps and align the clocks, after the host has waited for the device."""
        self.settle()
        if not self._open:
            self.clock.set_by_host()

    def finish(self) -> None:
        """Wait for the remaining steps at the end of the run and record them."""
        if self._open:
            self.clock.wait_for(self._open[-1].done)
            self.settle()

    def end_early(self) -> None:
        """Record what is known soon: the run may be ending because of the device."""
        until_s = perf_counter() + _LAST_CHANCE_S
        with suppress(RuntimeError):  # of a device that has failed; the run's own error counts
            self.settle()
            while self._open and perf_counter() < until_s:
                sleep(1e-3)
                self.settle()

    def take_mean_s(self) -> float | None:
        """Return seconds per step since the last call; None if the device has not completed one.

        Before the first step is complete, the time of the current one is used.
        """
        if not self._num_steps:
            began, now = self._step.began, self.now()
            is_known = began is not None and self.clock.is_reached(now)
            return self.clock.seconds(began, now) if is_known else None
        mean = self._seconds / self._num_steps
        self._seconds, self._num_steps = 0.0, 0
        return mean
