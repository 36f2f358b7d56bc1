"""The warm process: has imported everything once, and forks a spare when it is asked to.

A forked spare starts in milliseconds and shares the imported code's memory with the others, so
spares cost next to nothing. It is handed over to the supervisor as its own child (the process in
between ends at once, and the supervisor adopts orphans). No thread of Python's may run here: such a
process cannot be forked safely, and then it says so and spares are started afresh instead.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time

from drivetrain.supervise import worker

SOCKET = "DRIVETRAIN_WARM_FD"
READY, UNFIT = b"R", b"U"
MOST_BYTES = 1 << 17


def main() -> None:
    """`python -m drivetrain.supervise.warm [SCRIPT]`: the script's libraries are imported too."""
    line = socket.socket(fileno=int(os.environ.pop(SOCKET)))
    supervisor = int(os.environ[worker.PARENT])
    worker.die_with_parent()
    worker.import_ahead(sys.argv[1:])
    fit = threading.active_count() == 1
    line.send(READY if fit else UNFIT)
    while fit:
        message, descriptors, _, _ = socket.recv_fds(line, MOST_BYTES, 1)
        if not message:
            return
        sys.argv[1:] = json.loads(message)  # the words of the workers' command line
        pid = _fork_away(descriptors[0], line, supervisor)
        os.close(descriptors[0])
        line.send(f"{pid}\n".encode())


def _fork_away(control: int, line: socket.socket, supervisor: int) -> int:
    """A grandchild whose parent is gone; its process id."""
    sys.stdout.flush()
    sys.stderr.flush()
    reading, writing = os.pipe()
    between = os.fork()
    if between:
        os.close(writing)
        os.waitpid(between, 0)
        with os.fdopen(reading) as file:
            return int(file.read())
    pid = os.fork()
    if pid:
        os.write(writing, str(pid).encode())
        os._exit(0)
    os.close(reading)
    os.close(writing)
    line.close()
    _be_adopted(supervisor)
    os.setsid()
    os.environ[worker.PARENT] = str(supervisor)
    os.environ[worker.CONTROL] = str(control)
    worker.main()
    sys.exit(0)


def _be_adopted(supervisor: int) -> None:
    """Wait until the supervisor is this process's parent."""
    deadline_s = time.monotonic() + 5
    while os.getppid() != supervisor:
        if time.monotonic() > deadline_s:
            os._exit(1)
        time.sleep(0.0005)


if __name__ == "__main__":
    main()
