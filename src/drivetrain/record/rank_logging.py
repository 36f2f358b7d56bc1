"""Python `logging` on the console: only once, or from every rank with a label.

Every rank runs the script, so each of them logs the user's messages. Only handlers that write to
the console are changed here; others, such as a file per rank, are left alone.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from typing import Literal

LogRanks = Literal["first", "all"]


class _OfFirst(logging.Filter):
    """On ranks other than 0: pass only warnings and errors."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno >= logging.WARNING


class _Labelled(logging.Formatter):
    """The user's format, prefixed with the rank."""

    def __init__(self, rank: int, own: logging.Formatter | None) -> None:
        super().__init__()
        self._rank = rank
        self.own = own

    def format(self, record: logging.LogRecord) -> str:
        return f"[rank {self._rank}] {(self.own or logging.Formatter()).format(record)}"


def share_console(log_ranks: LogRanks, rank: int, world_size: int) -> None:
    """Adjust the current console handlers; may be called again for handlers added later."""
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
