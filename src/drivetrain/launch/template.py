"""A template: a process that has imported torch, and forks the supervisors of runs on request.

    python -m drivetrain.launch.template SOCKET SCRIPT

Importing torch takes seconds, in a run's supervisor and in each of its ranks. A process that starts
many short runs on one machine can run a template and name its socket in the environment:
`drivetrain train` then has its supervisor forked from it, and the supervisor forks its ranks.
Without a template, or if it cannot be forked, the supervisor is started as usual.

A guardian connects and sends its standard streams, arguments, environment and working directory. It
receives the supervisor's process id and, at the end, its exit code. Between the two is a process
forked by the template: the supervisor's parent, which kills it when the guardian is gone.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from drivetrain.core.imports import import_for_forks
from drivetrain.supervise.processes import worker
from drivetrain.supervise.processes.forking import Forked, fork_call, is_fork_safe
from drivetrain.supervise.processes.worker import PARENT

VARIABLE = "DRIVETRAIN_TEMPLATE"
_ANSWER_S = 60.0
_STREAMS = (0, 1, 2)


class Supervised:
    """A supervisor that a template has forked, as its guardian sees it."""

    def __init__(self, line: socket.socket, pid: int) -> None:
        self.pid = pid
        self._line = line
        self._code: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while it runs."""
        if self._code is None and select.select([self._line], [], [], 0)[0]:
            said = self._line.recv(32)
            # end of file: the process in between was killed, and the supervisor with it
            self._code = int(said) if said else -signal.SIGKILL
        return self._code

    def wait(self) -> int:
        """Wait for the supervisor to end; return its exit code."""
        while (code := self.poll()) is None:
            select.select([self._line], [], [])
        self._line.close()
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def ask(argv: Sequence[str], environment: Mapping[str, str]) -> Supervised | None:
    """Fork a supervisor from the template in the environment; None if that is not possible."""
    path = os.environ.get(VARIABLE)
    if path is None:
        return None
    own = {name: value for name, value in environment.items() if name != VARIABLE}
    request = {"argv": list(argv), "environment": own, "folder": str(Path.cwd())}
    line = socket.socket(socket.AF_UNIX)
    try:
        line.settimeout(_ANSWER_S)
        line.connect(path)
        socket.send_fds(line, [b"\n"], _STREAMS)
        line.sendall(json.dumps(request).encode() + b"\n")
        pid = int(line.recv(32))
    except (OSError, ValueError):
        line.close()
        return None
    line.settimeout(None)
    return Supervised(line, pid)


@contextlib.contextmanager
def kept(script: str) -> Iterator[None]:
    """Run a template for the runs of a script that this process starts in the meantime."""
    with tempfile.TemporaryDirectory(prefix="drivetrain-template-") as folder:
        path = Path(folder) / "socket"
        process = subprocess.Popen(
            [sys.executable, "-m", "drivetrain.launch.template", str(path), script],
            env={**os.environ, PARENT: str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # an error here appears again in the runs
            start_new_session=True,
        )
        os.environ[VARIABLE] = str(path)
        try:
            yield
        finally:
            del os.environ[VARIABLE]
            process.kill()
            process.wait()


def main() -> None:
    """Import, then serve until the parent process is gone."""
    path, script = Path(sys.argv[1]), sys.argv[2]
    worker.die_with_parent()
    worker.import_ahead([script])
    import_for_forks(("torch.distributed.run", "drivetrain.launch.local", "drivetrain.launch.node"))
    if not is_fork_safe():
        return
    with socket.socket(socket.AF_UNIX) as server:
        partial = path.with_name(f".{path.name}")
        server.bind(str(partial))
        server.listen()
        partial.rename(path)  # only once it can answer: until then, supervisors start as usual
        while True:
            line, _ = server.accept()
            with line, contextlib.suppress(OSError, ValueError):
                _serve(server, line)


def _serve(server: socket.socket, line: socket.socket) -> None:
    line.settimeout(_ANSWER_S)
    _, streams, _, _ = socket.recv_fds(line, 1, len(_STREAMS))
    request = json.loads(line.makefile().readline())
    line.settimeout(None)

    def between() -> None:
        server.close()
        for stream, number in zip(streams, _STREAMS, strict=True):
            os.dup2(stream, number)
            os.close(stream)
        os.chdir(request["folder"])
        _stand_between(line, request["argv"], request["environment"])

    try:
        fork_call(between, os.environ)
    finally:
        for stream in streams:
            os.close(stream)
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:  # reap earlier ones
            pass


def _stand_between(line: socket.socket, argv: list[str], environment: dict[str, str]) -> None:
    """Be the supervisor's parent until it has ended or its guardian is gone."""
    node = importlib.import_module("drivetrain.launch.node")

    def supervise() -> None:
        line.close()
        node.run(argv if "--warm-start" in argv else ["--warm-start", *argv])

    child = fork_call(supervise, {**environment, PARENT: str(os.getpid())})
    try:
        line.sendall(f"{child.pid}\n".encode())
        if _ends_before(child, line):
            line.sendall(f"{child.wait()}\n".encode())
    finally:
        child.kill()


def _ends_before(child: Forked, line: socket.socket) -> bool:
    """Wait: True if the supervisor has ended, False if the guardian is gone first."""
    watched = os.pidfd_open(child.pid)
    try:
        return watched in select.select([watched, line.fileno()], [], [])[0]
    finally:
        os.close(watched)


if __name__ == "__main__":
    main()
