"""Memory that is freed goes back to the system: ranks in shards share a host to the brim.

glibc serves blocks of up to 32 MB from heaps that seldom shrink. Gathered weights and gradients of
a step come and go in such blocks, of all sizes, and leave holes: a third of a rank's memory. Above
a fixed size blocks have pages of their own, which are given back when they are freed.
"""

from __future__ import annotations

import ctypes
import os

_OWN_PAGES = 1 << 20
_M_MMAP_THRESHOLD = -3


def give_back_freed() -> bool:
    """From here on, in this process; not where its user has set glibc up. Whether it was done."""
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return False
    try:
        done: int = ctypes.CDLL("libc.so.6").mallopt(_M_MMAP_THRESHOLD, _OWN_PAGES)
    except (OSError, AttributeError):  # another system, or another C library
        return False
    return done == 1
