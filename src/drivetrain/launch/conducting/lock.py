"""The lock of a run's conductor: whoever can take it knows that none is at work.

The system lets it go when its holder dies, however that comes about, so nobody has to guess from a
process id.
"""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path
from typing import IO

_FILE = "conductor.lock"


def hold(run_dir: Path) -> IO[str] | None:
    """Take it, for as long as the file stays open; None while somebody has it."""
    file = (run_dir / _FILE).open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    file.truncate(0)
    file.write(f"{socket.gethostname()} {os.getpid()}")
    file.flush()
    return file


def holder(run_dir: Path) -> tuple[str, int] | None:
    """The host and process id of the conductor at work; None when there is none."""
    try:
        with (run_dir / _FILE).open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                host, pid = file.read().split()
                return host, int(pid)
            return None
    except (FileNotFoundError, ValueError):  # just being taken
        return None
