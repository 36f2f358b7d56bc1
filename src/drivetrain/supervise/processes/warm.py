"""The warm process: imports everything once, and forks a spare on request.

A forked spare starts in milliseconds and shares the memory of the imported code with the others, so
spares cost almost nothing. The supervisor becomes its parent: the process in between exits at once,
and the supervisor adopts orphans. A process with Python threads, or in which an import has used an
accelerator, cannot be forked safely; it then reports that it is unfit, and spares are started as
new processes instead.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import socket
import sys
import time

from drivetrain.supervise.processes import worker
from drivetrain.supervise.processes.forking import fork_away, is_fork_safe

SOCKET = "DRIVETRAIN_WARM_FD"
READY, UNFIT = b"R", b"U"
MOST_BYTES = 1 << 17


def main() -> None:
    """`python -m drivetrain.supervise.processes.warm [SCRIPT]`; SCRIPT's imports are loaded too."""
    line = socket.socket(fileno=int(os.environ.pop(SOCKET)))
    supervisor = int(os.environ[worker.PARENT])
    worker.die_with_parent()
    worker.import_ahead(sys.argv[1:])
    gc.freeze()  # a collection in a spare must not copy the memory that all of them share
    fit = is_fork_safe()
    with contextlib.suppress(
        BrokenPipeError
    ):  # the supervisor is gone: the loop below sees end of file
        line.send(READY if fit else UNFIT)
    while fit:
        try:
            message, descriptors, _, _ = socket.recv_fds(line, MOST_BYTES, 1)
        except ConnectionResetError:  # the supervisor is gone and has not read what was sent
            return
        if not message:
            return
        control = descriptors[0]
        environment = {
            **os.environ,
            worker.PARENT: str(supervisor),
            worker.CONTROL: str(control),
        }
        argv = json.loads(message)  # the workers' command line
        pid = fork_away(lambda: _become_worker(argv, line, supervisor), environment)  # noqa: B023
        os.close(control)
        with contextlib.suppress(BrokenPipeError):
            line.send(f"{pid}\n".encode())


def _become_worker(argv: list[str], line: socket.socket, supervisor: int) -> None:
    line.close()
    _be_adopted(supervisor)
    sys.argv[1:] = argv
    worker.main()


def _be_adopted(supervisor: int) -> None:
    """Wait until the supervisor is this process's parent."""
    deadline_s = time.monotonic() + 5
    while os.getppid() != supervisor:
        if time.monotonic() > deadline_s:
            os._exit(1)
        time.sleep(0.0005)


if __name__ == "__main__":
    main()
