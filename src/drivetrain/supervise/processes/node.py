"""The processes of one node: workers, and warm spares that wait to become one.

Every process is started the same way and becomes a rank when it is told its environment over a
pipe. Each has a session of its own, so that ending it ends whatever it has started, and dies with
its supervisor.
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

from drivetrain.record.session import SESSION, page_path
from drivetrain.supervise.failures.rank_dump import DumpFiles, RankDump, collect_dumps
from drivetrain.supervise.processes import warm
from drivetrain.supervise.processes.forking import Forked, can_fork, fork_call
from drivetrain.supervise.processes.warm import MOST_BYTES, READY, SOCKET
from drivetrain.supervise.processes.worker import CONTROL, PARENT, WARM

_BACK_OFF_S = 10.0


class Process(Protocol):
    """What is asked of a process, started or adopted."""

    pid: int

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it lives."""
        ...

    def wait(self) -> int:
        """The same, once it has ended."""
        ...

    def kill(self) -> None:
        """At once."""
        ...


@dataclass
class Worker:
    """A process; `local_rank` is -1 until it has one."""

    process: Process
    control: int
    """Our end of its pipe."""
    local_rank: int = -1

    @property
    def pid(self) -> int:
        """Its process id, which is its group's too."""
        return self.process.pid

    def tell(self, environment: Mapping[str, str]) -> bool:
        """Make it a rank; False when it is gone already."""
        try:
            os.write(self.control, (json.dumps(dict(environment)) + "\n").encode())
        except OSError:
            return False
        finally:
            os.close(self.control)
            self.control = -1
        return True

    def signal(self, number: signal.Signals) -> None:
        """To the process alone."""
        if self.process.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """The process and all it started, at once."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.wait()
        with contextlib.suppress(ChildProcessError):  # what it had started has been adopted by us
            while os.waitpid(-self.pid, 0):
                pass
        if self.control >= 0:
            os.close(self.control)
            self.control = -1


class Node:
    """Starts, counts and ends the processes of this node."""

    def __init__(
        self,
        command: Sequence[str],
        session: Path,
        *,
        is_python: bool,
        warm_process: WarmProcess | None = None,
    ) -> None:
        self._command = list(command)
        self._session = session
        self._is_python = is_python
        self.workers: list[Worker] = []
        self._spares: list[Worker] = []
        self._not_before_s = 0.0
        self._environments: list[Mapping[str, str]] = []
        self._warm = warm_process
        adopt_orphans()

    def prepare(self, count: int) -> None:
        """Have so many processes waiting that need only be told their rank."""
        self._spares = [spare for spare in self._spares if spare.process.poll() is None]
        while self._is_python and len(self._spares) < count:
            self._spares.append(self._spawn(warm=False))

    def keep_warm(self, count: int, *, wait: bool = False) -> None:
        """Have so many that have imported everything, too; never waits unless asked to."""
        if not self._is_python or not count or time.monotonic() < self._not_before_s:
            return
        for spare in [spare for spare in self._spares if spare.process.poll() is not None]:
            spare.kill()  # it died of its imports, most likely: the next one would, too
            self._spares.remove(spare)
            self._not_before_s = time.monotonic() + _BACK_OFF_S
            return
        if self._warm is None:
            self._warm = WarmProcess(self._command[:1])
        state = self._warm.state(wait=wait)
        while state != "importing" and len(self._spares) < count:
            forked = self._warm.fork(self._command) if state == "ready" else None
            self._spares.append(forked or self._spawn(warm=True))

    def start(self, environments: Sequence[Mapping[str, str]]) -> None:
        """One worker per environment."""
        self._environments = list(environments)
        self.workers = [self._start_one(rank) for rank in range(len(environments))]

    def replace(self, local_rank: int) -> None:
        """Another process in a rank's place; the others are not touched."""
        self.workers[local_rank].kill()
        self.workers[local_rank] = self._start_one(local_rank)

    def _start_one(self, local_rank: int) -> Worker:
        page_path(self._session, local_rank).unlink(missing_ok=True)
        own = {**DumpFiles(self._session, local_rank).prepare(), SESSION: str(self._session)}
        # the warm process may be older than what the supervisor has set since
        whole = {**os.environ, **self._environments[local_rank], **own}
        worker = self._take(whole)
        if worker is None:
            worker = self._spawn(warm=False, environment=None if self._is_python else whole)
            if self._is_python:
                worker.tell(whole)
        worker.local_rank = local_rank
        return worker

    def _take(self, environment: Mapping[str, str]) -> Worker | None:
        """A waiting process that accepts the work."""
        while self._spares:
            spare = self._spares.pop(0)
            if spare.process.poll() is None and spare.tell(environment):
                return spare
            spare.kill()
        return None

    def exit_codes(self) -> dict[int, int]:
        """Of the workers that have ended, by local rank; negative for a signal."""
        codes = {worker.local_rank: worker.process.poll() for worker in self.workers}
        return {rank: code for rank, code in codes.items() if code is not None}

    def ask_to_stop(self, number: signal.Signals) -> None:
        """A Trainer saves and leaves, other scripts do what they do."""
        for worker in self.workers:
            worker.signal(number)

    def collect_dumps(self) -> dict[int, RankDump]:
        """What the ranks that live are doing, by local rank."""
        living = [worker for worker in self.workers if worker.process.poll() is None]
        return collect_dumps(self._session, living)

    def left_behind(self) -> dict[int, RankDump]:
        """What ranks that failed have left; nobody is asked, nobody waited for."""
        ended = (worker.local_rank for worker in self.workers if worker.process.poll())
        return {rank: DumpFiles(self._session, rank).read() for rank in ended}

    def kill(self) -> None:
        """End every worker, whatever it is doing."""
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
        command = self._command
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
    """The supervisor's end of the warm process (warm.py)."""

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
        """importing, ready, or unfit."""
        if self._state == "importing":
            self._line.settimeout(120 if wait else 0)
            try:
                self._state = "ready" if self._line.recv(1) == READY else "unfit"
            except (BlockingIOError, TimeoutError):
                return self._state
        return self._state

    def fork(self, command: Sequence[str]) -> Worker | None:
        """A spare in a few milliseconds; None when it cannot be had this way."""
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
    """Processes whose parent has ended become ours instead of the system's."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
