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
_MOST = 300
"""Characters that say who holds a lock."""


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
        with open(path, opener=_open_now, errors="replace") as file:
            if try_lock(file.fileno(), path, shared=True):
                return None
            return _named(file.read(_MOST)) or ("", 0)
    except FileNotFoundError:
        return None


def last_holder(path: Path) -> tuple[str, int] | None:
    """Who has taken it last, and may have it no more; None while it is just being taken."""
    try:
        with open(path, opener=_open_now, errors="replace") as file:
            return _named(file.read(_MOST))
    except FileNotFoundError:
        return None


def _named(text: str) -> tuple[str, int] | None:
    """None when it is just being taken, or says nothing that can be understood."""
    host, _, pid = text.partition(" ")
    return (host, int(pid)) if pid.isascii() and pid.isdigit() and len(pid) < 10 else None


def _open_now(path: str, flags: int) -> int:
    """Without waiting, should it be a pipe."""
    return os.open(path, flags | os.O_NONBLOCK)


def _let_go() -> None:
    """A child would keep the lock of a parent that is gone."""
    for file in _held:
        file.close()
    _held.clear()


os.register_at_fork(after_in_child=_let_go)
