"""The memory of this machine, and how much of it this container or job may use."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_LIMITS = ("memory.max", "memory/memory.limit_in_bytes")
"""The names in cgroup v2 and v1."""


def machine_bytes() -> int | None:
    """Return the machine's memory; None if the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def limit_bytes(groups: Path = _CGROUPS) -> int | None:
    """Return the memory limit of this container or job; None if there is none."""
    for name in _LIMITS:
        try:
            text = (groups / name).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < 2**60:  # cgroup v1 uses a huge number for "no limit"
            return int(text)
    return None


def usable_bytes(groups: Path = _CGROUPS) -> int | None:
    """Return the lesser of the two."""
    return min((size for size in (machine_bytes(), limit_bytes(groups)) if size), default=None)
