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
        with open(run_dir / _FILE, opener=_open_now, errors="replace") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                return _named(file.read(300))
            return None
    except FileNotFoundError:
        return None


def _named(text: str) -> tuple[str, int]:
    """Process 0 when it is just being taken, or says nothing that can be understood."""
    host, _, pid = text.partition(" ")
    return host, int(pid) if pid.isascii() and pid.isdigit() and len(pid) < 10 else 0


def _open_now(path: str, flags: int) -> int:
    """Without waiting, should it be a pipe."""
    return os.open(path, flags | os.O_NONBLOCK)
