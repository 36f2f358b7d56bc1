"""Clock and Waiting: the moments of a step, and the stretches in which a rank waits for others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from drivetrain.parallel.accelerator import Accelerator

# Clock: the moments between which a step's work is done, on the clock that counts.
#
# On the CPU that is the host's. An accelerator works on its own while the host runs ahead, and the
# host's clock says how long it took to ask for the work: there a moment is an event on the steps'
# stream, reached when the device has done what came before it. Seconds between two of them are
# known later, when the device is there. Nobody waits for that: they are read once they are known.

Moment = Any
"""A float on the host's clock, a `torch.Event` on a device's."""
Stretch = tuple[Moment, Moment]


class Clock(Protocol):
    """Tells moments, and later the time between them."""

    is_true: bool
    """Whether moments are those of the work itself."""

    def now(self) -> Moment:
        """This moment."""
        ...

    def seconds(self, start: Moment, end: Moment) -> float:
        """From one moment to another; both must have been reached."""
        ...

    def is_reached(self, moment: Moment) -> bool:
        """Whether its time is known by now."""
        ...

    def host_s(self, moment: Moment) -> float:
        """The same moment by `time.perf_counter`."""
        ...

    def wait_for(self, moment: Moment) -> None:
        """Block until it is reached."""
        ...

    def set_by_host(self) -> None:
        """The device has nothing left to do just now: its clock is set by the host's."""
        ...


class HostClock:
    """`time.perf_counter`. Not true where a device works on its own and cannot be asked."""

    now = staticmethod(perf_counter)

    def __init__(self, *, is_true: bool = True) -> None:
        self.is_true = is_true

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def is_reached(self, moment: float) -> bool:  # noqa: ARG002
        """It is past."""
        return True

    def host_s(self, moment: float) -> float:
        return moment

    def wait_for(self, moment: float) -> None:
        """It is past."""

    def set_by_host(self) -> None:
        """It is the host's."""


class DeviceClock:
    """Events on the stream that the steps run on."""

    is_true = True

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        accelerator.synchronize()
        self.set_by_host()

    def now(self) -> torch.Event:
        """When the device has done all that it was given so far."""
        event = self._accelerator.event()
        event.record()
        return event

    def seconds(self, start: torch.Event, end: torch.Event) -> float:
        """Of the device's time."""
        return start.elapsed_time(end) / 1e3

    def is_reached(self, moment: torch.Event) -> bool:
        """Asks, and does not wait."""
        return moment.query()

    def host_s(self, moment: torch.Event) -> float:
        """By the last time both clocks were read."""
        return self._set_at_s + self.seconds(self._set, moment)

    def wait_for(self, moment: torch.Event) -> None:
        """Until the device is there."""
        moment.synchronize()

    def set_by_host(self) -> None:
        """Read both clocks; events give the time between two moments, and no time of day."""
        self._set, self._set_at_s = self.now(), perf_counter()


def clock_of(accelerator: Accelerator) -> Clock:
    """The one that tells how long a device's work takes."""
    if accelerator.is_cpu:
        return HostClock()
    if not accelerator.has_timed_events:
        return HostClock(is_true=False)
    return DeviceClock(accelerator)


# Waiting: the stretches of a step in which a rank could do nothing but wait for others.
#
# A collective makes every rank as slow as the slowest, so the time of a step says nothing about
# whose fault it is. What counts is how long a rank was at work before it began to wait:
#
# - where gradients are reduced beside backward: from the moment this rank's last gradient is there,
#   until backward returns (`watch_gradients`). What was sent before that ran beside the rank's own
#   work and is not waiting;
# - the call that completes gradients, or agrees on weights;
# - what a strategy itself knows of (`ParallelModel.watch_waits`).
#
# Not measured: tensor, context and pipeline parallelism, and engines that step by themselves: their
# exchanges happen inside the model or the engine.


class Waiting:
    """Collects stretches; a step takes what there is."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = HostClock() if clock is None else clock
        self.now: Callable[[], Moment] = self._clock.now
        self._stretches: list[Stretch] = []
        self._gradients: LastGradient | None = None
        self.is_in_step = True
        """Between steps nothing is kept: an evaluation may gather weights a million times."""

    @property
    def is_on_host(self) -> bool:
        """Whether the moments are the host's: what blocks there is waiting."""
        return isinstance(self._clock, HostClock)

    def watch_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """What comes after the last of their gradients, until backward returns, is waiting."""
        self._gradients = LastGradient(parameters, self.now)

    def since(self, began: Moment) -> None:
        """All from that moment to this one was waiting."""
        self._stretches.append((began, self.now()))

    @contextmanager
    def around(self) -> Iterator[None]:
        """All that happens within is waiting."""
        began = self.now() if self.is_in_step else None
        yield
        if began is not None:
            self.since(began)

    def after_backward(self) -> None:
        """Backward has returned: whatever came after the last gradient was waiting."""
        if self._gradients is not None:
            last = self._gradients.take()
            if last is not None:
                self.since(last)

    def stop_watching(self) -> None:
        """Leave the gradients alone; for those who want to know what watching costs."""
        if self._gradients is not None:
            self._gradients.close()
            self._gradients = None

    def take(self) -> list[Stretch]:
        """What there was since the last call."""
        stretches, self._stretches = self._stretches, []
        return stretches


class LastGradient:
    """When the last gradient of a backward came in.

    Which one that is shows in the first backward, where all are watched; from then on one hook is
    left, so that a step costs a microsecond.
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
        """That moment; None when no gradient has come."""
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
