"""Faster imports of large modules, torch above all."""

from __future__ import annotations

import contextlib
import gc
import importlib
from collections.abc import Iterable, Iterator


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """Disable Python's garbage collector, which takes a fifth of torch's import time.

    The collector repeatedly scans all live objects as their number grows, but none of a module's
    definitions is garbage.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def import_for_forks(names: Iterable[str]) -> None:
    """Import the modules that every process forked from this one needs."""
    with without_collector():
        for name in names:
            importlib.import_module(name)
    gc.freeze()  # a collection in a fork would copy memory that the processes share
