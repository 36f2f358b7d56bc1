"""Who else used this machine's processors while a run was timed.

The campaign and all it starts are put into an accounting group of their own (cgroup version 1;
needs root). What the machine used beyond that is others', and so is what its host took away.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

_ALL = Path("/sys/fs/cgroup/cpuacct")
_STEAL = 8
"""Its column in /proc/stat."""


class Neighbours:
    """How many processors others kept busy, on average since it was made."""

    def __init__(self, own: Path) -> None:
        self._own = own
        self._before = self._now()

    def busy(self) -> float:
        """0.5 is half of one processor."""
        (then_s, used_then_s), (now_s, used_now_s) = self._before, self._now()
        return (used_now_s - used_then_s) / max(now_s - then_s, 1e-9)

    def _now(self) -> tuple[float, float]:
        used_s = (_usage_ns(_ALL) - _usage_ns(self._own)) * 1e-9
        steal = int(Path("/proc/stat").read_text().split("\n", 1)[0].split()[_STEAL])
        return time.monotonic(), used_s + steal / os.sysconf("SC_CLK_TCK")


def _usage_ns(group: Path) -> int:
    return int((group / "cpuacct.usage").read_text())


@contextmanager
def own_account() -> Iterator[Path]:
    """This process and what it will start, in a group of their own."""
    group = _ALL / f"drivetrain-{uuid4().hex[:8]}"
    group.mkdir()
    (group / "cgroup.procs").write_text(str(os.getpid()))
    try:
        yield group
    finally:
        for pid in (group / "cgroup.procs").read_text().split():
            (_ALL / "cgroup.procs").write_text(pid)
        group.rmdir()
