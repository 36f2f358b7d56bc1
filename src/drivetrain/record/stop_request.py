"""StopRequest: somebody asks the run to end soon: a scheduler's signal, seconds before the kill.

SIGTERM (Kubernetes, Slurm's preemption) and SIGUSR1 (Slurm's `--signal`) only set a flag; the loop
looks at it between steps. A second SIGTERM ends the process at once. `ask_to_stop` does the same
where a script runs in a thread and no signal reaches it (Ray).
"""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Any

_SAME_REQUEST_S = 5.0
"""Schedulers signal every process of a job, and the supervisor passes it on as well."""
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_listening: list[StopRequest] = []


def ask_to_stop(who: str) -> None:
    """What a signal would do, from any thread of this process; `who` asks."""
    for request in _listening:
        request.received = request.received or who


class StopRequest:
    """Remembers the first request."""

    def __init__(self) -> None:
        self.received: str | None = None
        """The signal's name, or whoever asked."""
        self._at_s = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def listen(self) -> None:
        """From now on; to signals in the main thread only, as Python has it."""
        _listening.append(self)
        if threading.current_thread() is threading.main_thread():
            self._before = {each: signal.signal(each, self._note) for each in SIGNALS}

    def close(self) -> None:
        """Listen no more."""
        if self in _listening:
            _listening.remove(self)
        for each, handler in self._before.items():
            signal.signal(each, handler)
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        now_s = time.monotonic()
        if self.received is None:
            self.received, self._at_s = signal.Signals(number).name, now_s
        elif number == signal.SIGTERM and now_s - self._at_s > _SAME_REQUEST_S:
            raise SystemExit(128 + number)
