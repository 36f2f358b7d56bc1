"""A pytest plugin: the fixture `no_leaks` fails a test that leaves something behind.

It is installed with Drivetrain. Use it per test, or for a whole suite in conftest.py:

    pytestmark = pytest.mark.usefixtures("no_leaks")
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest

# Prefixes of variables that pytest and torch set themselves, on import or first use.
_MAY_CHANGE = ("PYTEST_", "KMP_", "TORCHINDUCTOR_")
_DYING_S = 15.0
# These helpers end with the process they serve.
_HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """Fail if the test leaves environment variables, threads, processes or a process group."""
    variables = dict(os.environ)
    threads = set(threading.enumerate())
    children = child_pids()
    yield
    leaks = [
        *leaked_variables(variables),
        *leaked_threads(threads),
        *leaked_processes(children),
        *leaked_process_group(),
    ]
    if leaks:
        pytest.fail("left behind: " + "; ".join(leaks))


def leaked_variables(before: dict[str, str]) -> list[str]:
    """Return the variables that were added, changed or removed."""
    now = dict(os.environ)
    names = sorted(
        name
        for name in before.keys() | now.keys()
        if before.get(name) != now.get(name) and not name.startswith(_MAY_CHANGE)
    )
    return [f"environment variable {name}" for name in names]


def leaked_threads(before: set[threading.Thread], patience_s: float = 2.0) -> list[str]:
    """Return the new Python threads that are still alive after `patience_s`."""
    deadline_s = time.monotonic() + patience_s
    while True:
        left = [t for t in threading.enumerate() if t not in before and t.is_alive()]
        if not left or time.monotonic() > deadline_s:
            return [f"thread {thread.name}" for thread in left]
        time.sleep(0.02)


def leaked_processes(before: set[int], patience_s: float = 2.0) -> list[str]:
    """Return the new child processes that are still alive after `patience_s`.

    A process without a command line is exiting, which takes longer on a busy machine.
    """
    deadline_s = time.monotonic() + patience_s
    while True:
        left = child_pids() - before
        over_s = time.monotonic() - deadline_s
        if not left or over_s > _DYING_S or (over_s > 0 and all(map(_command, left))):
            return [f"process {pid} ({_command(pid)[:80]})" for pid in sorted(left)]
        time.sleep(0.02)


def leaked_process_group() -> list[str]:
    """Return the default process group if it was not destroyed."""
    import torch.distributed as dist

    return ["the default process group"] if dist.is_initialized() else []


def child_pids() -> set[int]:
    """Return living child processes, without multiprocessing's helpers; none without /proc."""
    pids = set()
    for task in os.listdir("/proc/self/task") if os.path.isdir("/proc/self/task") else ():
        try:
            with open(f"/proc/self/task/{task}/children") as file:
                pids |= {int(pid) for pid in file.read().split()}
        except OSError:
            continue
    return {
        pid
        for pid in pids
        if not _has_ended(pid) and not any(name in _command(pid) for name in _HELPERS)
    }


def _has_ended(pid: int) -> bool:
    """True if the process has exited, even if its exit code was not collected yet."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def _command(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return "gone"
