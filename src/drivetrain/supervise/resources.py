"""ResourceWatch: memory held by each rank of a node, and CPU time it had to wait for.

Sampled periodically, so that the values are still known after the system has killed a rank.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

_EVERY_S = 0.5
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
Facts = dict[str, float | int | None]


@dataclass
class _RankUsage:
    pid: int
    group: Path | None
    """Its memory control group, read while the process lives."""
    oom_kills_before: int
    held_bytes: int
    first: tuple[float, float]
    """(time, seconds spent waiting for a CPU) when it was first sampled."""
    last: tuple[float, float]
    """The same when it was last sampled."""


@dataclass
class ResourceWatch:
    """The resource usage of a node's ranks, by local rank."""

    _ranks: dict[int, _RankUsage] = field(default_factory=dict)
    _next_s: float = 0.0
    _host_kills_before: int = 0
    """The host's count of OOM kills at the last sample: later ones have just happened."""

    def look(self, pids: Iterable[tuple[int, int]], now_s: float) -> None:
        """Sample the live processes, given as (local rank, pid); at most twice a second."""
        if now_s < self._next_s:
            return
        self._next_s = now_s + _EVERY_S
        self._host_kills_before = _host_oom_kills()
        for rank, pid in pids:
            self._look_at(rank, pid, now_s)

    def _look_at(self, rank: int, pid: int, now_s: float) -> None:
        own = Path(f"/proc/{pid}")
        try:
            held_bytes = int((own / "statm").read_text().split()[1]) * _PAGE_BYTES
            group = _memory_group((own / "cgroup").read_text())
            starved = (now_s, _without_processor_s(own))
        except (OSError, ValueError, IndexError):
            return
        if not held_bytes:  # it has just ended
            return
        known = self._ranks.get(rank)
        if known is None or known.pid != pid:
            self._ranks[rank] = _RankUsage(
                pid, group, _oom_kills(group), held_bytes, starved, starved
            )
            return
        if known.group != group:
            known.group, known.oom_kills_before = group, _oom_kills(group)
        known.held_bytes, known.last = held_bytes, starved

    def facts(self) -> dict[int, Facts]:
        """Each rank's last known memory, its limit, OOM kills since then, and CPU starvation."""
        host_kills = _host_oom_kills() - self._host_kills_before if self._ranks else 0
        return {
            rank: {
                "held_bytes": known.held_bytes,
                "limit_bytes": _limit(known.group),
                "oom_kills": _oom_kills(known.group) - known.oom_kills_before,
                "host_oom_kills": host_kills,
                "starved_share": _share(known.first, known.last),
            }
            for rank, known in self._ranks.items()
        }


def processor_s(pid: int) -> float | None:
    """CPU seconds used by all threads of a process; None if it no longer exists."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None


def _share(first: tuple[float, float], last: tuple[float, float]) -> float | None:
    """Share of the time between two samples in which it was ready to run but not running."""
    elapsed_s = last[0] - first[0]
    return round((last[1] - first[1]) / elapsed_s, 4) if elapsed_s > 0 else None


def _without_processor_s(own: Path) -> float:
    """Seconds its main thread was ready to run but not running, also because of a CPU quota."""
    return int((own / "schedstat").read_text().split()[1]) * 1e-9


def _memory_group(cgroups: str) -> Path | None:
    """From /proc/<pid>/cgroup: cgroup version 1 names the controller, version 2 does not."""
    found = None
    for line in cgroups.splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return Path("/sys/fs/cgroup/memory") / path.lstrip("/")
        if not controllers:
            found = Path("/sys/fs/cgroup") / path.lstrip("/")
    return found


def _oom_kills(group: Path | None) -> int:
    """Number of processes in this cgroup that the OOM killer has killed so far."""
    for name in ("memory.events", "memory.oom_control"):
        for line in _read(group, name).splitlines():
            word, _, count = line.partition(" ")
            if word == "oom_kill" and count.strip().isdigit():
                return int(count)
    return 0


def _host_oom_kills() -> int:
    """OOM kills on the whole machine: a rank that grows fast is never sampled near its limit."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def _limit(group: Path | None) -> int | None:
    """The memory limit in bytes, at most the machine's memory."""
    total = os.sysconf("SC_PHYS_PAGES") * _PAGE_BYTES
    for name in ("memory.max", "memory.limit_in_bytes"):
        text = _read(group, name).strip()
        if text.isdigit():
            return min(int(text), total)
    return total


def _read(group: Path | None, name: str) -> str:
    if group is None:
        return ""
    try:
        return (group / name).read_text()
    except OSError:
        return ""
