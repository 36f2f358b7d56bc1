"""StopRequest: somebody asks the run to end soon: a scheduler's signal, seconds before the kill.

SIGTERM (Kubernetes, Slurm's preemption) and SIGUSR1 (Slurm's `--signal`) only set a flag; the loop
looks at it between steps. A second SIGTERM ends the process at once.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """Listens while the context is open; in the main thread only, as Python has it."""

    def __init__(self) -> None:
        self.received: str | None = None
        """The signal's name."""
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {each: signal.signal(each, self._note) for each in SIGNALS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if self.received is not None and number == signal.SIGTERM:
            raise SystemExit(128 + number)
        self.received = signal.Signals(number).name
