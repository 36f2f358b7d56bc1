"""The guardian: the process of `drivetrain train`, which keeps a supervisor alive.

A supervisor can be killed too, by the system when memory runs out, or by mistake. Its ranks die
with it; the guardian, which does almost nothing and so rarely fails, restarts it, and the run
resumes from its last checkpoint.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import IO

from drivetrain.core import locks
from drivetrain.core.errors import ConfigError, EnvironmentProblem, Preempted, Problem
from drivetrain.core.requirements import require_linux
from drivetrain.launch import node, template
from drivetrain.launch.early import command_of_ranks, is_alone, parsed, starting_line
from drivetrain.launch.template import Supervised
from drivetrain.record.plain_run import resume_with_launcher
from drivetrain.record.run_directory import RunDirectory, cannot_write
from drivetrain.record.session import COMMAND_S, NODE_SESSION, process_began_s, run_directory_in
from drivetrain.supervise.failures.attempt_report import write_closed, write_lost
from drivetrain.supervise.failures.failure import comes_from_outside
from drivetrain.supervise.policy import ONLY_FROM_THE_START
from drivetrain.supervise.processes.forking import Forked, can_fork, fork_call
from drivetrain.supervise.processes.worker import PARENT
from drivetrain.supervise.script import imports_drivetrain

# One launcher per run: a second one is refused before it has changed anything.
#
# Checkpoints need no lock, since attempts fence each other off; but two launchers would keep taking
# the run from each other. The nodes of a run hold a shared lock, a single launcher an exclusive
# one.

LOCK = "launcher.lock"
_LEASE_S = 120.0
"""By then a file server has released the locks of a host that is down (NFS 4: after 90 s)."""
_POLL_S = 1.0


@contextmanager
def only_launcher(argv: Sequence[str]) -> Iterator[None]:
    """Hold the lock of the run that the command line names, if any."""
    found = _run_of(argv)
    if found is None:
        yield
        return
    directory, alone = found
    path = RunDirectory.at(directory).path / LOCK
    try:
        lock = _taken(path, shared=not alone)
    except EnvironmentProblem as error:
        sys.stderr.write(f"warning: a second launcher on this run cannot be detected: {error}\n")
        yield
        return
    except OSError as error:
        raise cannot_write("--run-dir", directory, error) from error
    with lock:
        yield


def _run_of(argv: Sequence[str]) -> tuple[Path, bool] | None:
    """Return the run directory and whether this node is the whole run; None if not known."""
    try:
        _, args, given = parsed(argv)
        if args.run_dir is None:
            return None
        several = "--nnodes" not in given and os.environ.get("PET_NNODES", "1") != "1"
        return Path(args.run_dir), is_alone(args, given) and not several
    except (ConfigError, argparse.ArgumentError, ValueError):
        return None  # reported by the parser that reads it next


def _taken(path: Path, *, shared: bool) -> IO[str]:
    deadline_s, is_said = time.monotonic() + _LEASE_S, False
    while (lock := locks.hold(path, shared=shared)) is None:
        host, pid = locks.last_holder(path) or ("", 0)
        if host == socket.gethostname() or time.monotonic() > deadline_s:
            rule = f"is being run by process {pid} on {host}"
            remedy = "wait until it ends, stop it, or give another directory"
            raise ConfigError([Problem("--run-dir", rule, remedy, str(path.parent))])
        if host and not is_said:
            is_said = True
            sys.stderr.write(
                f"process {pid} on {host} runs {path.parent}; waiting, in case that host is down\n"
            )
        time.sleep(_POLL_S)
    return lock


_MOST_RESTARTS = 5
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def guard(argv: Sequence[str]) -> int:
    """Run a supervisor for this command line; return its exit code."""
    try:
        require_linux(
            "ranks with a supervisor",
            "train in one process with `python SCRIPT`, or submit it (--on slurm …)",
        )
        with only_launcher(argv):
            if (line := starting_line(argv)) is not None:
                sys.stderr.write(f"{line}\n")
                sys.stderr.flush()
            return _guard(argv)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code


def _guard(argv: Sequence[str]) -> int:
    session = Path(tempfile.mkdtemp(prefix="drivetrain-"))
    guardian = _Guardian(argv, session)
    before = {number: signal.signal(number, guardian.forward) for number in _FORWARDED}
    try:
        return guardian.run()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        shutil.rmtree(session, ignore_errors=True)


class _Guardian:
    def __init__(self, argv: Sequence[str], session: Path) -> None:
        self._argv = list(argv)
        self._session = session
        self._process: subprocess.Popen[bytes] | Forked | Supervised | None = None
        self._asked_with: int | None = None
        self._began_s = process_began_s()

    def run(self) -> int:
        for restarts_left in reversed(range(_MOST_RESTARTS + 1)):
            code = self._run_once()
            if code >= 0:
                write_closed(self._session, code)
                return code
            if self._asked_with == signal.SIGUSR1 == -code:
                # the time limit's signal came before it listened: there is nothing to save
                return Preempted.exit_code
            killed_by = signal.Signals(-code).name
            why_not = self._why_not_restarted(killed_by, restarts_left)
            if self._asked_with != -code:  # that it ended by what the user sent is no news
                done = f"not restarted: {why_not}" if why_not else "restarting it"
                sys.stderr.write(f"the supervisor was killed by {killed_by}; {done}\n")
                sys.stderr.flush()
            write_lost(self._session, killed_by, restarts=not why_not)
            if why_not:
                break
        write_closed(self._session, 128 - code)
        return 128 - code

    def _why_not_restarted(self, killed_by: str, restarts_left: int) -> str:
        """Return why the supervisor is not restarted; empty if it is."""
        if self._asked_with is not None:
            return "it was asked to stop"
        if not self._can_resume(killed_by):
            return ONLY_FROM_THE_START
        if not restarts_left:
            return f"this happened {_MOST_RESTARTS + 1} times; {self._how_to_resume()}"
        return ""

    def _how_to_resume(self) -> str:
        is_named = _run_of(self._argv) is not None
        return resume_with_launcher(None if is_named else run_directory_in(self._session))

    def _can_resume(self, killed_by: str) -> bool:
        """True if ranks have begun to train, or were still starting and will train."""
        if (self._session / "run-0").exists():
            return True
        try:
            command, _, _ = parsed(self._argv)
        except (ConfigError, argparse.ArgumentError, ValueError):
            return False
        return comes_from_outside(killed_by) and imports_drivetrain(command_of_ranks(command))

    def _run_once(self) -> int:
        # its own session: a Ctrl-C in the terminal reaches it once, through us
        environment = {
            **os.environ,
            NODE_SESSION: str(self._session),
            PARENT: str(os.getpid()),
            COMMAND_S: str(self._began_s),
        }
        self._process = template.ask(self._argv, environment) or self._start(environment)
        if self._asked_with is not None:  # the signal came while it was being started
            self._process.send_signal(self._asked_with)
        return self._process.wait()

    def _start(self, environment: dict[str, str]) -> subprocess.Popen[bytes] | Forked:
        if can_fork():
            return fork_call(lambda: node.run(self._argv), environment)
        command = [sys.executable, "-m", "drivetrain.launch.node", *self._argv]
        return subprocess.Popen(command, env=environment, start_new_session=True)

    def forward(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self._asked_with = number
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)
