"""The processes of one node: workers, and warm spares that wait to become workers.

Every process is started the same way and becomes a rank when it receives its environment over a
pipe. Each has its own session, so that killing it also kills what it has started, and dies with its
supervisor.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from drivetrain.record.session import SESSION, forget_attempt, page_path
from drivetrain.supervise.failures.rank_dump import DumpFiles, RankDump, collect_dumps
from drivetrain.supervise.processes import warm
from drivetrain.supervise.processes.forking import Forked, can_fork, fork_call
from drivetrain.supervise.processes.warm import MOST_BYTES, READY, SOCKET
from drivetrain.supervise.processes.worker import CONTROL, PARENT, WARM

_BACK_OFF_S = 10.0


class Process(Protocol):
    """What the supervisor needs of a process, started or adopted."""

    pid: int

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while it runs."""
        ...

    def wait(self) -> int:
        """Wait for the process to end; return its exit code."""
        ...

    def kill(self) -> None:
        """Send SIGKILL."""
        ...


@dataclass
class Worker:
    """A process that is or can become a rank; `local_rank` is -1 until then."""

    process: Process
    control: int
    """The supervisor's end of its control pipe; -1 once closed."""
    local_rank: int = -1

    @property
    def pid(self) -> int:
        """The process id, which is also its process group's id."""
        return self.process.pid

    def tell(self, environment: Mapping[str, str]) -> bool:
        """Send it the environment that makes it a rank; False if it no longer exists."""
        try:
            os.write(self.control, (json.dumps(dict(environment)) + "\n").encode())
        except OSError:
            return False
        finally:
            os.close(self.control)
            self.control = -1
        return True

    def signal(self, number: signal.Signals) -> None:
        """Signal the process only, not its group."""
        if self.process.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process and everything it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.wait()
        with contextlib.suppress(ChildProcessError):  # its children were adopted by this process
            while os.waitpid(-self.pid, 0):
                pass
        if self.control >= 0:
            os.close(self.control)
            self.control = -1


class Node:
    """Starts, watches and kills the processes of this node."""

    def __init__(
        self,
        command: Sequence[str],
        session: Path,
        *,
        is_python: bool,
        warm_process: WarmProcess | None = None,
    ) -> None:
        self.command = list(command)
        self._session = session
        self._is_python = is_python
        self.workers: list[Worker] = []
        self._spares: list[Worker] = []
        self._not_before_s = 0.0
        self._environments: list[Mapping[str, str]] = []
        self._warm = warm_process
        adopt_orphans()

    def prepare(self, count: int) -> None:
        """Keep `count` processes waiting that only need to be given a rank."""
        self._spares = [spare for spare in self._spares if spare.process.poll() is None]
        while self._is_python and len(self._spares) < count:
            self._spares.append(self._spawn(warm=False))

    def keep_warm(self, count: int, *, wait: bool = False) -> None:
        """Keep `count` spares that have imported everything; blocks only if `wait`."""
        if not self._is_python or not count or time.monotonic() < self._not_before_s:
            return
        for spare in [spare for spare in self._spares if spare.process.poll() is not None]:
            spare.kill()  # probably its imports failed, as they would in the next one
            self._spares.remove(spare)
            self._not_before_s = time.monotonic() + _BACK_OFF_S
            return
        if self._warm is None:
            self._warm = WarmProcess(self.command[:1])
        state = self._warm.state(wait=wait)
        while state != "importing" and len(self._spares) < count:
            forked = self._warm.fork(self.command) if state == "ready" else None
            self._spares.append(forked or self._spawn(warm=True))

    def start(self, environments: Sequence[Mapping[str, str]]) -> None:
        """Start one worker per environment."""
        self._environments = list(environments)
        forget_attempt(self._session)
        self.workers = [self._start_one(rank) for rank in range(len(environments))]

    def replace(self, local_rank: int) -> None:
        """Kill and restart one rank; the others are not affected."""
        self.workers[local_rank].kill()
        self.workers[local_rank] = self._start_one(local_rank)

    def _start_one(self, local_rank: int) -> Worker:
        page_path(self._session, local_rank).unlink(missing_ok=True)
        own = {**DumpFiles(self._session, local_rank).prepare(), SESSION: str(self._session)}
        # the supervisor may have set variables since the warm process started
        whole = {**os.environ, **self._environments[local_rank], **own}
        worker = self._take(whole)
        if worker is None:
            worker = self._spawn(warm=False, environment=None if self._is_python else whole)
            if self._is_python:
                worker.tell(whole)
        worker.local_rank = local_rank
        return worker

    def _take(self, environment: Mapping[str, str]) -> Worker | None:
        """Make a waiting process the rank; None if there is none."""
        while self._spares:
            spare = self._spares.pop(0)
            if spare.process.poll() is None and spare.tell(environment):
                return spare
            spare.kill()
        return None

    def exit_codes(self) -> dict[int, int]:
        """Exit codes of the workers that have ended, by local rank; negative for a signal."""
        codes = {worker.local_rank: worker.process.poll() for worker in self.workers}
        return {rank: code for rank, code in codes.items() if code is not None}

    def ask_to_stop(self, number: signal.Signals) -> None:
        """Send the signal to all workers: a Trainer saves and exits."""
        for worker in self.workers:
            worker.signal(number)

    def collect_dumps(self) -> dict[int, RankDump]:
        """Return what the live ranks are doing, by local rank."""
        living = [worker for worker in self.workers if worker.process.poll() is None]
        return collect_dumps(self._session, living)

    def left_behind(self) -> dict[int, RankDump]:
        """Return the dumps that failed ranks have left, without asking or waiting."""
        ended = (worker.local_rank for worker in self.workers if worker.process.poll())
        return {rank: DumpFiles(self._session, rank).read() for rank in ended}

    def kill(self) -> None:
        """Kill all workers."""
        for worker in self.workers:
            worker.kill()
        self.workers = []

    def close(self) -> None:
        self.kill()
        for spare in self._spares:
            spare.kill()
        self._spares = []
        if self._warm is not None:
            self._warm.close()

    def _spawn(self, *, warm: bool, environment: Mapping[str, str] | None = None) -> Worker:
        reading, writing = os.pipe()
        own = {CONTROL: str(reading), PARENT: str(os.getpid())}
        if warm:
            own[WARM] = "1"
        command = self.command
        if self._is_python:
            command = [
                sys.executable,
                "-u",
                "-m",
                "drivetrain.supervise.processes.worker",
                *command,
            ]
        process = subprocess.Popen(
            command,
            env={**os.environ, **own, **(environment or {})},
            pass_fds=[reading],
            start_new_session=True,
        )
        os.close(reading)
        return Worker(process, writing)


class WarmProcess:
    """The supervisor's handle of the warm process (warm.py)."""

    def __init__(self, script: Sequence[str] = ()) -> None:
        self._line, theirs = socket.socketpair()
        self._state = "importing"
        environment = {
            **os.environ,
            PARENT: str(os.getpid()),
            SOCKET: str(theirs.fileno()),
        }
        self._process: Process
        if can_fork():
            self._process = fork_call(warm.main, environment)
        else:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-m", "drivetrain.supervise.processes.warm", *script],
                env=environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        theirs.close()

    def state(self, *, wait: bool = False) -> str:
        """Return "importing", "ready" or "unfit" (cannot be forked)."""
        if self._state == "importing":
            self._line.settimeout(120 if wait else 0)
            try:
                self._state = "ready" if self._line.recv(1) == READY else "unfit"
            except (BlockingIOError, TimeoutError):
                return self._state
        return self._state

    def fork(self, command: Sequence[str]) -> Worker | None:
        """Fork a spare, in a few milliseconds; None if that is not possible."""
        words = json.dumps(list(command)).encode()
        if len(words) > MOST_BYTES:
            return None
        reading, writing = os.pipe()
        try:
            self._line.settimeout(5)
            socket.send_fds(self._line, [words], [reading])
            pid = int(self._line.recv(32))
        except (OSError, ValueError):
            self._state = "unfit"
            os.close(writing)
            return None
        finally:
            os.close(reading)
        return Worker(Forked(pid), writing)

    def close(self) -> None:
        self._line.close()
        self._process.kill()
        self._process.wait()


def adopt_orphans() -> None:
    """Make this process the parent of orphaned descendants, instead of init."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
