"""The guardian: all that `drivetrain train` itself does is keep a supervisor alive.

A supervisor can be killed too, by the system when memory runs out, or by a mistake. Its ranks die
with it; the guardian, which does next to nothing and so has next to nothing to die of, starts it
again, and the run goes on from its last checkpoint.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from drivetrain.core.errors import ConfigError, Preempted
from drivetrain.core.requirements import require_linux
from drivetrain.launch import node
from drivetrain.launch.run_lock import only_launcher
from drivetrain.record.session import COMMAND_S, NODE_SESSION, process_began_s
from drivetrain.supervise.failures.attempt_report import write_closed
from drivetrain.supervise.processes.forking import Forked, can_fork, fork_call
from drivetrain.supervise.processes.worker import PARENT

_MOST_RESTARTS = 5
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def guard(words: Sequence[str]) -> int:
    """Run a supervisor for these words; its exit code."""
    try:
        require_linux(
            "ranks with a supervisor",
            "train in one process with `python SCRIPT`, or submit it (--on slurm …)",
        )
        with only_launcher(words):
            return _guard(words)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code


def _guard(words: Sequence[str]) -> int:
    session = Path(tempfile.mkdtemp(prefix="drivetrain-"))
    guardian = _Guardian(words, session)
    before = {number: signal.signal(number, guardian.forward) for number in _FORWARDED}
    try:
        return guardian.run()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        shutil.rmtree(session, ignore_errors=True)


class _Guardian:
    def __init__(self, words: Sequence[str], session: Path) -> None:
        self._words = list(words)
        self._session = session
        self._process: subprocess.Popen[bytes] | Forked | None = None
        self._asked_with: int | None = None
        self._began_s = process_began_s()

    def run(self) -> int:
        for _ in range(_MOST_RESTARTS + 1):
            code = self._run_once()
            if code >= 0:
                write_closed(self._session, code)
                return code
            if self._asked_with == signal.SIGUSR1 == -code:
                # its time was up before it could listen: nothing to save, everything to do
                return Preempted.exit_code
            killed_by = signal.Signals(-code).name
            has_begun = (self._session / "run-0").exists()
            if self._asked_with is not None or not has_begun:
                break
            sys.stderr.write(f"the supervisor was killed by {killed_by}; starting it again\n")
            sys.stderr.flush()
        return 128 - code

    def _run_once(self) -> int:
        # its own session: a Ctrl-C in the terminal reaches it once, through us
        environment = {
            **os.environ,
            NODE_SESSION: str(self._session),
            PARENT: str(os.getpid()),
            COMMAND_S: str(self._began_s),
        }
        if can_fork():
            self._process = fork_call(lambda: node.run(self._words), environment)
        else:
            command = [sys.executable, "-m", "drivetrain.launch.node", *self._words]
            self._process = subprocess.Popen(command, env=environment, start_new_session=True)
        if self._asked_with is not None:  # while it was being started, with nobody to tell yet
            self._process.send_signal(self._asked_with)
        return self._process.wait()

    def forward(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self._asked_with = number
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)
