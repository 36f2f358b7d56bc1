"""StepTimer: marks the moments of a step, and writes the step down once their times are known.

On the CPU that is at once. On an accelerator the host is steps ahead: what it has marked is read
when the device has come there, in order, and never waited for before the run ends.
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
"""Enough to hold a run against its plan."""
_LAST_CHANCE_S = 0.5
"""Enough for a step that is done; a device that is stuck in a collective is not waited for."""


@dataclass(slots=True)
class _Step:
    """What was marked of one step."""

    began: Moment
    data: list[Stretch]
    optimizing: Moment = None
    ended: Moment = None
    in_backward: Sequence[Stretch] = ()
    """Waiting for other ranks."""
    in_optimizer: Sequence[Stretch] = ()
    held: Sequence[Stretch] = ()
    """In the optimizer step: weights could not move before they were copied."""
    saving: Sequence[Stretch] = ()
    done: Moment = None
    """Everything that belongs to the step, what came after it included."""
    number: int = 0
    flags: int = 0

    def times(self, clock: Clock) -> StepTimes:
        """Seconds that follow each other and add up to the whole step."""
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
    """One rank's steps. Every loop marks the same moments in the same order."""

    def __init__(self, clock: Clock, waiting: Waiting) -> None:
        self.clock = clock
        self.now = clock.now
        self.recorder: Recorder | None = None
        """Where steps are written down; set when the run has one."""
        self._waiting = waiting
        self._step = _Step(None, [])
        self._no_flags = 0 if clock.is_true else HOST_TIMED
        self._flags = self._no_flags
        self._held: list[Stretch] = []
        self._saving: list[Stretch] = []
        self._open: deque[_Step] = deque()
        self._seconds, self._num_steps = 0.0, 0
        self.first_s: list[float] = []
        """How long the first steps took, without what came between them."""

    def begin(self) -> None:
        """A step begins."""
        self._waiting.take()  # what came before this step was not its waiting
        self._waiting.is_in_step = True
        self._step = _Step(self.now(), [])

    def waited_for_data(self, asked: Moment) -> None:
        """A batch has come, that was asked for at that moment."""
        self._step.data.append((asked, self.now()))

    def optimizing(self) -> None:
        """Backward is through."""
        self._step.optimizing = self.now()
        self._step.in_backward = self._waiting.take()

    def ended(self) -> None:
        """The weights have moved."""
        step = self._step
        step.ended = self.now()
        step.in_optimizer = self._waiting.take()
        self._waiting.is_in_step = False
        if self._held:
            step.held, self._held = self._held, []

    def held(self, since: Moment) -> None:
        """Since that moment the weights could not move, because they were being copied."""
        self._held.append((since, self.now()))

    @contextmanager
    def saving(self) -> Iterator[None]:
        """The steps stand still for a save."""
        began = self.now()
        try:
            yield
        finally:
            self._saving.append((began, self.now()))

    def compiled(self) -> None:
        """Something was compiled in the step under way, or since the last one."""
        self._flags |= COMPILES

    def done(self, number: int) -> None:
        """All that belongs to the step is done; it is the run's `number`-th, counted from 1."""
        step = self._step
        step.done, step.number = self.now(), number
        step.flags, self._flags = self._flags, self._no_flags
        if self._saving:
            step.saving, self._saving = self._saving, []
        self._open.append(step)
        self.settle()

    def settle(self) -> None:
        """Write down what is known by now."""
        while self._open and self.clock.is_reached(self._open[0].done):
            times = self._open.popleft().times(self.clock)
            self._seconds += sum(times[2:-1])
            self._num_steps += 1
            if len(self.first_s) < _FIRST_STEPS:
                self.first_s.append(sum(times[2:6]))
            if self.recorder is not None:
                self.recorder.step(times)

    def caught_up(self) -> None:
        """The host has just waited for the device: all is known, and both clocks show the same."""
        self.settle()
        if not self._open:
            self.clock.set_by_host()

    def finish(self) -> None:
        """The run is over: wait for the rest."""
        if self._open:
            self.clock.wait_for(self._open[-1].done)
            self.settle()

    def end_early(self) -> None:
        """The run ends, perhaps because of the device: write down what is soon known."""
        until_s = perf_counter() + _LAST_CHANCE_S
        with suppress(RuntimeError):  # of a device that has failed; the run's own error counts
            self.settle()
            while self._open and perf_counter() < until_s:
                sleep(1e-3)
                self.settle()

    def take_mean_s(self) -> float | None:
        """Seconds a step since the last call; None while the device has not come to the end of one.

        Before the first is done, the one under way counts.
        """
        if not self._num_steps:
            began, now = self._step.began, self.now()
            is_known = began is not None and self.clock.is_reached(now)
            return self.clock.seconds(began, now) if is_known else None
        mean = self._seconds / self._num_steps
        self._seconds, self._num_steps = 0.0, 0
        return mean
