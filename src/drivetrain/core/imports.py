"""Importing what is large, torch above all."""

from __future__ import annotations

import contextlib
import gc
import importlib
from collections.abc import Iterable, Iterator


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """Import without Python's garbage collector, which takes a fifth of the time torch needs.

    It looks through every object that lives, again and again as their number grows; of a module's
    definitions none is garbage.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def import_for_forks(names: Iterable[str]) -> None:
    """Import what every process that is forked from this one will need."""
    with without_collector():
        for name in names:
            importlib.import_module(name)
    gc.freeze()  # a collection in a fork would copy the memory that all of them share
