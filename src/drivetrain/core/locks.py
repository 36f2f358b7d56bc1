"""Locks on files: whoever has one says who it is, and the system frees it when its holder dies.

A file system without locks is never taken for one where the lock is free, or is somebody's: that it
has none is said.
"""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path
from typing import IO

from drivetrain.core.errors import EnvironmentProblem, Problem

_held: set[IO[str]] = set()


def try_lock(descriptor: int, path: Path, *, shared: bool = False) -> bool:
    """Whether it is ours now, until the descriptor is closed; False while somebody has it."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        rule = f"this file system has no locks (flock: {error.strerror})"
        remedy = "mount it with locks (Lustre: -o flock), or take a --run-dir on one that has them"
        raise EnvironmentProblem([Problem(str(path.parent), rule, remedy, None, False)]) from error
    return True


def hold(path: Path, *, shared: bool = False) -> IO[str] | None:
    """Take the lock, for as long as the file stays open; None while somebody has it."""
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
    """The host and process id of who has the lock; None when nobody has."""
    try:
        with path.open() as file:
            return None if try_lock(file.fileno(), path, shared=True) else last_holder(path)
    except FileNotFoundError:
        return None


def last_holder(path: Path) -> tuple[str, int] | None:
    """Who has taken it last, and may have it no more; None while it is just being taken."""
    try:
        host, pid = path.read_text().split()
        return host, int(pid)
    except (FileNotFoundError, ValueError):
        return None


def _let_go() -> None:
    """A child would keep the lock of a parent that is gone."""
    for file in _held:
        file.close()
    _held.clear()


os.register_at_fork(after_in_child=_let_go)
