"""Lines of Python's `logging` on the console: once, or from every rank and labelled.

Every rank runs the script, so that a line of the user's is logged by each of them. What goes to a
terminal is shared out here; handlers that write elsewhere, such as a file per rank, are left alone.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from typing import Literal

LogRanks = Literal["first", "all"]


class _OfFirst(logging.Filter):
    """For the other ranks: only what somebody should know although rank 0 is well."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno >= logging.WARNING


class _Labelled(logging.Formatter):
    """The user's own format, with the rank in front."""

    def __init__(self, rank: int, own: logging.Formatter | None) -> None:
        super().__init__()
        self._rank = rank
        self.own = own

    def format(self, record: logging.LogRecord) -> str:
        return f"[rank {self._rank}] {(self.own or logging.Formatter()).format(record)}"


def share_console(log_ranks: LogRanks, rank: int, world_size: int) -> None:
    """See to the handlers that write to the console now; may be called again for later ones."""
    for handler in _console_handlers():
        if isinstance(handler.formatter, _Labelled):
            handler.setFormatter(handler.formatter.own)
        for each in [each for each in handler.filters if isinstance(each, _OfFirst)]:
            handler.removeFilter(each)
        if world_size == 1 or (log_ranks == "first" and rank == 0):
            continue
        handler.setFormatter(_Labelled(rank, handler.formatter))
        if log_ranks == "first":
            handler.addFilter(_OfFirst())


def _console_handlers() -> Iterator[logging.Handler]:
    console = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    known = [logging.root, *logging.root.manager.loggerDict.values()]
    found = {
        handler
        for logger in known
        if isinstance(logger, logging.Logger)
        for handler in logger.handlers
    }
    found |= {logging.lastResort} if logging.lastResort else set()
    for handler in found:
        if isinstance(handler, logging.StreamHandler) and handler.stream in console:
            yield handler
