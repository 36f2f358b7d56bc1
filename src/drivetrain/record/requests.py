"""What is asked of the ranks of a run: a profile, or to end soon."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

# ProfileRequest: what `drivetrain profile` asks of the ranks, passed on in the environment.

PROFILE_VARIABLE = "DRIVETRAIN_PROFILE"


@dataclass(frozen=True)
class ProfileRequest:
    """Which ranks and steps, and where the traces go."""

    folder: str
    ranks: tuple[int, ...] = (0,)
    """Empty: all of them."""
    first_step: int = 5
    last_step: int = 10
    py_spy: bool = False

    def wants(self, rank: int, step: int) -> bool:
        """Steps count from 1."""
        is_chosen = not self.ranks or rank in self.ranks
        return is_chosen and self.first_step <= step <= self.last_step

    def trace(self, rank: int) -> Path:
        """The name that TensorBoard's plug-in and Perfetto take."""
        return Path(self.folder) / f"rank-{rank:05d}.pt.trace.json.gz"

    def flame_graph(self, rank: int) -> Path:
        """py-spy's picture."""
        return Path(self.folder) / f"rank-{rank:05d}.svg"

    def environment(self) -> dict[str, str]:
        return {
            PROFILE_VARIABLE: json.dumps(asdict(self)),
            "KINETO_LOG_LEVEL": os.environ.get("KINETO_LOG_LEVEL", "5"),  # says it is starting
        }

    @classmethod
    def from_environment(cls) -> ProfileRequest:
        plain = json.loads(os.environ[PROFILE_VARIABLE])
        return cls(**{**plain, "ranks": tuple(plain["ranks"])})


# StopRequest: somebody asks the run to end soon: a scheduler's signal, seconds before the kill.
#
# SIGTERM (Kubernetes, Slurm's preemption) and SIGUSR1 (Slurm's `--signal`) only set a flag; the
# loop looks at it between steps. A second SIGTERM ends the process at once. `ask_to_stop` does the
# same where a script runs in a thread and no signal reaches it (Ray).

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
