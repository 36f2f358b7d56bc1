"""File locks that record their holder; the system releases a lock when its holder dies.

A file system without locks raises an error: it is never mistaken for one where the lock is free or
taken.
"""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path
from typing import IO

from drivetrain.core.errors import EnvironmentProblem, Problem

_held: set[IO[str]] = set()
_MOST = 300
"""Characters read of a lock file, which name the holder."""


def try_lock(descriptor: int, path: Path, *, shared: bool = False) -> bool:
    """Take the lock until the descriptor is closed; return False if another process holds it."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        rule = f"this file system does not support locks (flock: {error.strerror})"
        remedy = "mount it with locks (Lustre: -o flock), or use a --run-dir on one that does"
        raise EnvironmentProblem([Problem(str(path.parent), rule, remedy, None, False)]) from error
    return True


def hold(path: Path, *, shared: bool = False) -> IO[str] | None:
    """Take the lock for as long as the file stays open; None if another process holds it."""
    file = path.open("a+")
    try:
        if not try_lock(file.fileno(), path, shared=shared):
            file.close()
            return None
    except BaseException:
        file.close()
        raise
    file.truncate(0)
    file.write(f"{socket.gethostname()} {os.getpid()}")
    file.flush()
    _held.add(file)
    return file


def holder(path: Path) -> tuple[str, int] | None:
    """Return the host and process id of the lock's holder; None if the lock is free."""
    try:
        with open(path, opener=_open_now, errors="replace") as file:
            if try_lock(file.fileno(), path, shared=True):
                return None
            return _named(file.read(_MOST)) or ("", 0)
    except FileNotFoundError:
        return None


def last_holder(path: Path) -> tuple[str, int] | None:
    """Return the last holder, which may have released it; None while it is being taken."""
    try:
        with open(path, opener=_open_now, errors="replace") as file:
            return _named(file.read(_MOST))
    except FileNotFoundError:
        return None


def _named(text: str) -> tuple[str, int] | None:
    """Return None if the lock is just being taken, or if the text cannot be parsed."""
    host, _, pid = text.partition(" ")
    return (host, int(pid)) if pid.isascii() and pid.isdigit() and len(pid) < 10 else None


def _open_now(path: str, flags: int) -> int:
    """Open without blocking, in case the file is a pipe."""
    return os.open(path, flags | os.O_NONBLOCK)


def _let_go() -> None:
    """Close the locks in a forked child, which would otherwise keep a dead parent's locks."""
    for file in _held:
        file.close()
    _held.clear()


os.register_at_fork(after_in_child=_let_go)
