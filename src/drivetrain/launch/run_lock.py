"""One launcher to a run: a second one is refused before it has touched anything.

Checkpoints need no lock, since attempts fence each other off; but two launchers would take the run
from each other for ever. The nodes of one run share the lock; a launcher alone has it alone.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from drivetrain.core import locks
from drivetrain.core.errors import ConfigError, EnvironmentProblem, Problem
from drivetrain.launch.early import is_alone, parsed
from drivetrain.record.run_directory import RunDirectory, cannot_write

_FILE = "launcher.lock"
_LEASE_S = 120.0
"""After so long a file server has freed the locks of a host that is gone (NFS 4: 90 s)."""
_POLL_S = 1.0


@contextmanager
def only_launcher(words: Sequence[str]) -> Iterator[None]:
    """Hold the lock of the run that the words name, if they name one."""
    found = _run_of(words)
    if found is None:
        yield
        return
    directory, alone = found
    path = RunDirectory.at(directory).path / _FILE
    try:
        lock = _taken(path, shared=not alone)
    except EnvironmentProblem as error:
        sys.stderr.write(f"warning: two launchers on this run could not be told apart: {error}\n")
        yield
        return
    except OSError as error:
        raise cannot_write("--run-dir", directory, error) from error
    with lock:
        yield


def _run_of(words: Sequence[str]) -> tuple[Path, bool] | None:
    """The run's directory, and whether this node is all of it; None when there is none to know."""
    try:
        _, args, given = parsed(words)
        if args.run_dir is None:
            return None
        several = "--nnodes" not in given and os.environ.get("PET_NNODES", "1") != "1"
        return Path(args.run_dir), is_alone(args, given) and not several
    except (ConfigError, argparse.ArgumentError, ValueError):
        return None  # said by those who read it again


def _taken(path: Path, *, shared: bool) -> IO[str]:
    deadline_s, is_said = time.monotonic() + _LEASE_S, False
    while (lock := locks.hold(path, shared=shared)) is None:
        host, pid = locks.last_holder(path) or ("", 0)
        if host == socket.gethostname() or time.monotonic() > deadline_s:
            rule = f"is being run by process {pid} on {host}"
            remedy = "wait until that has ended, stop it, or give another directory"
            raise ConfigError([Problem("--run-dir", rule, remedy, str(path.parent))])
        if host and not is_said:
            is_said = True
            sys.stderr.write(
                f"process {pid} on {host} runs {path.parent}; waiting, in case that host is gone\n"
            )
        time.sleep(_POLL_S)
    return lock
