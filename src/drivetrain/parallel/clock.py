"""Clock and Waiting: timestamps of a step, and the intervals in which a rank waits for others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from drivetrain.parallel.accelerator import Accelerator

# Clock: timestamps ("moments") of a step's work, on the clock that measures the work itself.
#
# On the CPU that is the host's clock. An accelerator runs asynchronously, so the host's clock would
# measure how long it takes to enqueue the work: there a moment is an event on the steps' stream,
# reached when the device has finished everything before it. The seconds between two moments are
# known later, when the device has reached them. They are read then, without blocking.

Moment = Any
"""A float on the host's clock, a `torch.Event` on a device's."""
Stretch = tuple[Moment, Moment]


class Clock(Protocol):
    """Takes timestamps, and later tells the time between them."""

    is_true: bool
    """Whether moments measure the work itself."""

    def now(self) -> Moment:
        """Take a timestamp."""
        ...

    def seconds(self, start: Moment, end: Moment) -> float:
        """Return the time between two moments; both must have been reached."""
        ...

    def is_reached(self, moment: Moment) -> bool:
        """True if its time is known; never blocks."""
        ...

    def host_s(self, moment: Moment) -> float:
        """Convert a moment to `time.perf_counter`."""
        ...

    def wait_for(self, moment: Moment) -> None:
        """Block until it is reached."""
        ...

    def set_by_host(self) -> None:
        """Synchronize the device's clock with the host's; call while the device is idle."""
        ...


class HostClock:
    """`time.perf_counter`; `is_true` is False for a device without timed events."""

    now = staticmethod(perf_counter)

    def __init__(self, *, is_true: bool = True) -> None:
        self.is_true = is_true

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def is_reached(self, moment: float) -> bool:  # noqa: ARG002
        return True

    def host_s(self, moment: float) -> float:
        return moment

    def wait_for(self, moment: float) -> None:
        """Return immediately."""

    def set_by_host(self) -> None:
        """Do nothing: it is the host's clock."""


class DeviceClock:
    """A clock that records events on the stream that the steps run on."""

    is_true = True

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        accelerator.synchronize()
        self.set_by_host()

    def now(self) -> torch.Event:
        """Record an event, reached when the device has finished the work enqueued so far."""
        event = self._accelerator.event()
        event.record()
        return event

    def seconds(self, start: torch.Event, end: torch.Event) -> float:
        return start.elapsed_time(end) / 1e3

    def is_reached(self, moment: torch.Event) -> bool:
        return moment.query()

    def host_s(self, moment: torch.Event) -> float:
        """Convert it by the last time that both clocks were read."""
        return self._set_at_s + self.seconds(self._set, moment)

    def wait_for(self, moment: torch.Event) -> None:
        moment.synchronize()

    def set_by_host(self) -> None:
        """Read both clocks, because events give only the time between two moments."""
        self._set, self._set_at_s = self.now(), perf_counter()


def clock_of(accelerator: Accelerator) -> Clock:
    """Return the clock that measures a device's work."""
    if accelerator.is_cpu:
        return HostClock()
    if not accelerator.has_timed_events:
        return HostClock(is_true=False)
    return DeviceClock(accelerator)


# Waiting: the intervals of a step in which a rank could only wait for others.
#
# A collective makes every rank as slow as the slowest, so the time of a step does not show which
# rank is slow. What shows it is how long a rank worked before it started to wait. Waiting is:
#
# - with gradients reduced during backward: the time from this rank's last gradient until backward
#   returns (`watch_gradients`). Earlier communication overlaps with the rank's own work;
# - the call that completes gradients, or synchronizes weights;
# - what a strategy reports itself (`ParallelModel.watch_waits`).
#
# Not measured: tensor, context and pipeline parallelism, and engines that step by themselves: they
# communicate inside the model or the engine.


class Waiting:
    """Collects waiting intervals, which each step takes."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = HostClock() if clock is None else clock
        self.now: Callable[[], Moment] = self._clock.now
        self._stretches: list[Stretch] = []
        self._gradients: LastGradient | None = None
        self.is_in_step = True
        """False between steps, when nothing is recorded: an evaluation may gather very often."""

    @property
    def is_on_host(self) -> bool:
        """True if moments are the host's, so that a blocking call counts as waiting."""
        return isinstance(self._clock, HostClock)

    def watch_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Count the time from the last of their gradients until backward returns as waiting."""
        self._gradients = LastGradient(parameters, self.now)

    def since(self, began: Moment) -> None:
        """Count the time since that moment as waiting."""
        self._stretches.append((began, self.now()))

    @contextmanager
    def around(self) -> Iterator[None]:
        """Count everything inside the context as waiting."""
        began = self.now() if self.is_in_step else None
        yield
        if began is not None:
            self.since(began)

    def after_backward(self) -> None:
        """Call this when backward returns: the time since the last gradient was waiting."""
        if self._gradients is not None:
            last = self._gradients.take()
            if last is not None:
                self.since(last)

    def stop_watching(self) -> None:
        """Remove the gradient hooks; to measure what they cost."""
        if self._gradients is not None:
            self._gradients.close()
            self._gradients = None

    def take(self) -> list[Stretch]:
        """Return the intervals since the last call."""
        stretches, self._stretches = self._stretches, []
        return stretches


class LastGradient:
    """Records when the last gradient of a backward was accumulated.

    The first backward hooks all parameters to find the last one; afterwards only that hook is kept,
    so the cost per step is a microsecond.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], now: Callable[[], Moment]) -> None:
        self._now = now
        self._at: Moment | None = None
        self._last: torch.Tensor | None = None
        self._handles: list[RemovableHandle] = [
            p.register_post_accumulate_grad_hook(self._note_first)
            for p in parameters
            if p.requires_grad
        ]

    def take(self) -> Moment | None:
        """Return that moment; None if there was no gradient."""
        at, self._at = self._at, None
        if at is not None and self._last is not None:
            self._settle(self._last)
        return at

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _settle(self, last: torch.Tensor) -> None:
        self.close()
        self._handles = [last.register_post_accumulate_grad_hook(self._note)]
        self._last = None

    def _note_first(self, parameter: torch.Tensor) -> None:
        self._last, self._at = parameter, self._now()

    def _note(self, parameter: torch.Tensor) -> None:  # noqa: ARG002
        self._at = self._now()
