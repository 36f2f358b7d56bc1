"""Requests: the signals that ask a supervisor to have its ranks save and stop.

A signal handler only records the signal; the supervisor's loop acts on it at its next iteration.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

from drivetrain.supervise.processes.head_start import ASKS, HeadStart

_Result = TypeVar("_Result")


class Interrupted(Exception):
    """A request arrived during a blocking call."""


class Requests:
    """Records the signals that arrive while it is listening."""

    def __init__(self) -> None:
        self.pending = ""
        """The name of the last signal that has not been taken yet; empty if there is none."""
        self._interrupts = False
        self._wakeup = -1

    @contextmanager
    def listening(self, head_start: HeadStart | None) -> Iterator[None]:
        """Install the handlers; a signal that arrived during a head start counts too."""
        self._wakeup, writing = os.pipe()
        os.set_blocking(self._wakeup, False)
        os.set_blocking(writing, False)
        before = {number: signal.signal(number, self._note) for number in ASKS}
        old = signal.set_wakeup_fd(writing)
        if head_start is not None:
            self.pending = self.pending or head_start.asked
        try:
            yield
        finally:
            signal.set_wakeup_fd(old)
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(self._wakeup)
            os.close(writing)

    def take(self) -> str:
        """Return the pending signal's name and clear it."""
        pending, self.pending = self.pending, ""
        return pending

    def wait(self, pids: Iterable[int], seconds: float) -> None:
        """Wait until one of the processes ends, a signal arrives, or the time is up."""
        with selectors.DefaultSelector() as selector:
            descriptors = []
            try:
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):
                        descriptors.append(os.pidfd_open(pid))
                        selector.register(descriptors[-1], selectors.EVENT_READ)
                selector.register(self._wakeup, selectors.EVENT_READ)
                selector.select(seconds)
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
        with contextlib.suppress(BlockingIOError):
            os.read(self._wakeup, 64)

    def interrupting(self, call: Callable[[], _Result]) -> _Result:
        """Make a blocking call; a request interrupts it with Interrupted."""
        self._interrupts = True
        try:
            return call()
        finally:
            self._interrupts = False

    def _note(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self.pending = signal.Signals(number).name
        if self._interrupts:
            raise Interrupted
