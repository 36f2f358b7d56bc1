"""Requests to the ranks of a run: to record a profile, or to stop soon."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from drivetrain.cluster.environments import detect
from drivetrain.record.plain_run import is_plain

# ProfileRequest: sent by `drivetrain profile` to the ranks in an environment variable.

PROFILE_VARIABLE = "DRIVETRAIN_PROFILE"


@dataclass(frozen=True)
class ProfileRequest:
    """Which ranks and steps to profile, and where to write the traces."""

    folder: str
    ranks: tuple[int, ...] = (0,)
    """The ranks to profile; empty for all."""
    first_step: int = 5
    last_step: int = 10
    py_spy: bool = False

    def wants(self, rank: int, step: int) -> bool:
        """Whether to profile this rank at this step; steps count from 1."""
        is_chosen = not self.ranks or rank in self.ranks
        return is_chosen and self.first_step <= step <= self.last_step

    def trace(self, rank: int) -> Path:
        """Return a rank's trace file, named as TensorBoard's plug-in and Perfetto expect."""
        return Path(self.folder) / f"rank-{rank:05d}.pt.trace.json.gz"

    def flame_graph(self, rank: int) -> Path:
        """Return the file of a rank's py-spy flame graph."""
        return Path(self.folder) / f"rank-{rank:05d}.svg"

    def environment(self) -> dict[str, str]:
        return {
            PROFILE_VARIABLE: json.dumps(asdict(self)),
            "KINETO_LOG_LEVEL": os.environ.get("KINETO_LOG_LEVEL", "5"),  # no start-up message
        }

    @classmethod
    def from_environment(cls) -> ProfileRequest:
        plain = json.loads(os.environ[PROFILE_VARIABLE])
        return cls(**{**plain, "ranks": tuple(plain["ranks"])})


# StopRequest: a request to end the run soon, such as a scheduler's signal seconds before the kill.
#
# SIGTERM (Kubernetes, Slurm's preemption) and SIGUSR1 (Slurm's `--signal`) only set a flag; the
# loop checks it between steps. A second SIGTERM ends the process at once. In a plain
# `python script.py`, SIGINT (Ctrl-C) does the same. `ask_to_stop` is for a script that runs in a
# thread, which signals do not reach (Ray).

_SAME_REQUEST_S = 5.0
"""Signals within this time are one request: both scheduler and supervisor send them."""
_SAME_CTRL_C_S = 0.5
"""SIGINTs within this time are one Ctrl-C: the terminal and a wrapper (torchrun, uv) send it."""
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_HEARD = b"Ctrl-C: the run will save and stop; press it again to end at once\n"
_listening: list[StopRequest] = []


def ask_to_stop(who: str) -> None:
    """Request a stop from any thread of this process; `who` is the requester's name."""
    for request in _listening:
        request.received = request.received or who


class StopRequest:
    """Listens for stop requests and remembers the first one."""

    def __init__(self) -> None:
        self.received: str | None = None
        """The signal's name, or the name of the requester."""
        self._at_s = 0.0
        self._before: dict[signal.Signals, Any] = {}
        self._says_so_in = 0
        """Process that says that it has noticed Ctrl-C; its data workers notice it as well."""

    def listen(self) -> None:
        """Start listening; signals are handled only in the main thread, as Python requires."""
        _listening.append(self)
        if threading.current_thread() is not threading.main_thread():
            return
        numbers: tuple[signal.Signals, ...] = SIGNALS
        # otherwise Ctrl-C belongs to the script, or to what runs it
        if is_plain() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            numbers += (signal.SIGINT,)
            self._says_so_in = os.getpid() if detect().is_main else 0
        self._before = {each: signal.signal(each, self._note) for each in numbers}

    def close(self) -> None:
        if self in _listening:
            _listening.remove(self)
        for each, handler in self._before.items():
            if signal.getsignal(each) == self._note:  # not one that the script has set meanwhile
                signal.signal(each, handler)
        self._before = {}

    def pass_on_ctrl_c(self) -> None:
        """Interrupt the script if Ctrl-C came too late to stop its run. Call after `close`."""
        if self.received == signal.SIGINT.name:
            signal.raise_signal(signal.SIGINT)

    def _note(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        now_s = time.monotonic()
        if self.received is None:
            self.received, self._at_s = signal.Signals(number).name, now_s
            if number == signal.SIGINT and self._says_so_in == os.getpid():
                with suppress(OSError):
                    os.write(2, _HEARD)  # sys.stderr may be in the middle of a write
        elif number == signal.SIGINT and now_s - self._at_s > _SAME_CTRL_C_S:
            raise KeyboardInterrupt
        elif number == signal.SIGTERM and now_s - self._at_s > _SAME_REQUEST_S:
            raise SystemExit(128 + number)
