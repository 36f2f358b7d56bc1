"""A head start: ranks begin while their supervisor still imports torch, which takes seconds.

On one machine there is no rendezvous, so a rank's environment is known beforehand, including the
port of the store: its socket listens from the beginning, and connections wait in the system's queue
until the supervisor serves them. The supervisor later compares this environment with the one it
would have set; if they differ, the ranks are restarted.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from drivetrain.record.session import COMMAND_S, LAUNCHED_S
from drivetrain.supervise.machine import SAME_REQUEST_S
from drivetrain.supervise.processes.node import Node

ASKS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
"""The signals that ask a supervisor to have its ranks save and stop."""
ADDRESS = "127.0.0.1"
ROLE = "default"


def request(signal_name: str) -> str:
    """The message when a supervisor is asked to stop."""
    is_ctrl_c = signal_name == signal.SIGINT.name
    again = "; press Ctrl-C again to stop at once, without saving" if is_ctrl_c else ""
    return f"{signal_name} received: asking the ranks to save and stop{again}"


class HeadStart:
    """Ranks that have begun, and what the supervisor needs to make them its own."""

    def __init__(
        self, command: Sequence[str], session: Path, num_ranks: int, restarts: int
    ) -> None:
        self.session = session
        self.asked = ""
        """The signal that arrived before the supervisor was listening; ranks may be running."""
        self.request_said_s: float | None = None
        """When the user was told that the signal arrived, on the monotonic clock."""
        for number in ASKS:
            signal.signal(number, self._note)
        self.run_id = uuid.uuid4().hex
        self.listener = socket.create_server((ADDRESS, 0), backlog=max(128, num_ranks))
        self.node = Node(command, session, is_python=True)
        shared = self._of_all_ranks(num_ranks, restarts)
        self._told = [
            {**shared, **_of_one_rank(rank), "TORCHELASTIC_ERROR_FILE": str(_errors(session, rank))}
            for rank in range(num_ranks)
        ]
        self.node.start([{**told, LAUNCHED_S: str(time.time())} for told in self._told])

    def _note(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        now_s, is_ctrl_c = time.monotonic(), number == signal.SIGINT
        said_s = self.request_said_s
        if is_ctrl_c and said_s is not None and now_s - said_s >= SAME_REQUEST_S:
            _say("stopped: a second SIGINT ended it at once")
            self.node.kill()
            sys.exit(128 + number)
        if is_ctrl_c and said_s is None:
            # someone is waiting, and the supervisor's imports take seconds
            self.request_said_s = now_s
            _say(request(signal.SIGINT.name))
        self.asked = signal.Signals(number).name

    def has_told(self, environments: Sequence[Mapping[str, str]]) -> bool:
        """True if its ranks have these environments, apart from their launch time."""
        wanted = [
            {name: value for name, value in environment.items() if name != LAUNCHED_S}
            for environment in environments
        ]
        return wanted == self._told

    def _of_all_ranks(self, num_ranks: int, restarts: int) -> dict[str, str]:
        sizes = ("LOCAL_WORLD_SIZE", "WORLD_SIZE", "ROLE_WORLD_SIZE")
        return {
            **dict.fromkeys(sizes, str(num_ranks)),
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "ROLE_NAME": ROLE,
            "MASTER_ADDR": ADDRESS,
            "MASTER_PORT": str(self.listener.getsockname()[1]),
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": str(restarts),
            "TORCHELASTIC_RUN_ID": self.run_id,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.getenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
            COMMAND_S: os.environ[COMMAND_S],
        }


def _say(text: str) -> None:
    os.write(2, f"{text}\n".encode())  # sys.stderr may be in the middle of a write


def _of_one_rank(rank: int) -> dict[str, str]:
    return dict.fromkeys(("LOCAL_RANK", "RANK", "ROLE_RANK"), str(rank))


def _errors(session: Path, rank: int) -> Path:
    return session / "errors" / f"1-{rank}.json"
