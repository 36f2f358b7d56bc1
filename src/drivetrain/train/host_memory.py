"""Return freed host memory to the system, because sharded ranks on the CPU share a full host.

glibc serves blocks of up to 32 MB from heaps that seldom shrink. Gathered weights and gradients are
allocated and freed in such blocks, of all sizes, and leave holes: a third of a rank's memory. With
a fixed threshold, larger blocks get their own pages, which are returned when they are freed.
"""

from __future__ import annotations

import ctypes
import os

_OWN_PAGES = 1 << 20
_M_MMAP_THRESHOLD = -3


def give_back_freed() -> bool:
    """Set glibc's threshold for this process, unless the user configured it; True if it was set."""
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return False
    try:
        done: int = ctypes.CDLL("libc.so.6").mallopt(_M_MMAP_THRESHOLD, _OWN_PAGES)
    except (OSError, AttributeError):  # another system, or another C library
        return False
    return done == 1
