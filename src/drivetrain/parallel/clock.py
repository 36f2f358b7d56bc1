"""Clock: the moments between which a step's work is done, on the clock that counts.

On the CPU that is the host's. An accelerator works on its own while the host runs ahead, and the
host's clock says how long it took to ask for the work: there a moment is an event on the steps'
stream, reached when the device has done what came before it. Seconds between two of them are known
later, when the device is there. Nobody waits for that: they are read once they are known.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any, Protocol

import torch

from drivetrain.parallel.accelerator import Accelerator

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
        """The difference."""
        return end - start

    def is_reached(self, moment: float) -> bool:  # noqa: ARG002
        """It is past."""
        return True

    def host_s(self, moment: float) -> float:
        """Itself."""
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
