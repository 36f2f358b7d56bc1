"""A template: one process per host that has imported everything and forks each drill's nodes.

A campaign starts hundreds of launchers; without this it would spend most of its time importing
torch. The forked process runs what `drivetrain train` runs: guardian, supervisor and ranks as
separate processes, in the host's namespaces.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from drivetrain.core.imports import import_for_forks
from drivetrain.core.traits import all_traits
from drivetrain.supervise.processes.forking import Forked, fork_away
from drivetrain.testing.hosts import Host
from drivetrain.verify.drills.clock import skew_as_told

_MOST_BYTES = 1 << 18
_MODULES = (
    "torch._dynamo",
    "torch.distributed.run",
    "drivetrain.launch.local",
    "drivetrain.supervise.agent",
    "drivetrain.supervise.starting",
    "drivetrain.verify.drills.hooks",
    "drivetrain.train.trainer",
)


class Template:
    """The campaign's client of the template process; starts it on first use and after a crash."""

    def __init__(self, folder: Path, host: Host | None = None) -> None:
        self._path = folder / f"template-{'here' if host is None else host.name}"
        self._host = host
        self._process: subprocess.Popen[str] | None = None

    def start(self, argv: Sequence[str], environment: Mapping[str, str], log: Path) -> Forked:
        """Start `drivetrain train ARGV` on the host, as a child of this process."""
        self.wake()
        request = {"argv": list(argv), "environment": dict(environment), "log": str(log)}
        with socket.socket(socket.AF_UNIX) as line:
            line.connect(str(self._path))
            line.sendall(json.dumps(request).encode() + b"\n")
            pid = int(line.makefile().readline())
        return Forked(pid)

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._path.unlink(missing_ok=True)

    @property
    def pid(self) -> int:
        """Process id of the template, or -1."""
        return -1 if self._process is None else self._process.pid

    def wake(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        self._path.unlink(missing_ok=True)
        argv = [sys.executable, "-m", "drivetrain.verify.drills.template", str(self._path)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PARENT": str(os.getpid())}
        if self._host is None:
            self._process = subprocess.Popen(argv, env=environment, text=True)
        else:
            self._process = self._host.popen(argv, env=environment)
        deadline_s = time.monotonic() + 60
        while not self._path.exists():
            if time.monotonic() > deadline_s or self._process.poll() is not None:
                raise RuntimeError("the template did not start")
            time.sleep(0.01)


def main() -> None:
    """`python -m drivetrain.verify.drills.template SOCKET`."""
    preloaded = (name for traits in all_traits() for name in traits.preload)
    import_for_forks((*_MODULES, *preloaded))
    parent = int(os.environ["PARENT"])
    path = Path(sys.argv[1])
    with socket.socket(socket.AF_UNIX) as server:
        partial = path.with_name(f".{path.name}")
        partial.unlink(missing_ok=True)
        server.bind(str(partial))
        server.listen()
        partial.rename(path)
        server.settimeout(1)
        while os.getppid() == parent:
            try:
                line, _ = server.accept()
            except TimeoutError:
                continue
            with line:
                request = json.loads(line.makefile().readline())
                pid = fork_away(lambda: _launch(request), _environment(request))  # noqa: B023
                line.sendall(f"{pid}\n".encode())


def _environment(request: dict[str, object]) -> dict[str, str]:
    environment = request["environment"]
    return dict(environment) if isinstance(environment, dict) else {}


def _launch(request: dict[str, object]) -> None:
    from drivetrain.launch.guardian import guard

    skew_as_told()
    descriptor = os.open(str(request["log"]), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    argv = request["argv"]
    sys.argv = ["drivetrain", "train"]
    sys.exit(guard([str(word) for word in argv] if isinstance(argv, list) else []))


if __name__ == "__main__":
    main()
