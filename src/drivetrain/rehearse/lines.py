"""The user's own line, out of a stack that is mostly libraries."""

from __future__ import annotations

import linecache
import sys
import sysconfig
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType, TracebackType

_LIBRARIES = tuple(
    str(Path(place).resolve())
    for place in {
        Path(__file__).parents[1],  # this package
        *(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib")),
        *(Path(sysconfig.get_path(name)) for name in ("platlib",)),
    }
)

FIT = "rehearse_fit"
"""Where the user's own loss and hooks are called from."""


@dataclass(frozen=True)
class Line:
    """A line of a file of the user's."""

    file: str
    number: int
    function: str

    @property
    def text(self) -> str:
        """The source."""
        return linecache.getline(self.file, self.number).strip()

    def __str__(self) -> str:
        path = Path(self.file)
        here = Path.cwd()
        shown = path.relative_to(here) if path.is_relative_to(here) else path
        return f"{shown}:{self.number} in {self.function}: {self.text}"


@cache
def is_users(file: str) -> bool:
    """Whether a file is neither ours nor a library's."""
    if file.startswith("<"):
        return False
    path = str(Path(file).resolve())
    return not path.startswith(_LIBRARIES) and "site-packages" not in path


def here(skip: int = 1) -> Line | None:
    """The innermost line of the user's below fit(); None in backward, which has none."""
    frame: FrameType | None = sys._getframe(skip)  # noqa: SLF001 - the documented way to the stack
    while frame is not None and frame.f_code.co_name != FIT:
        if is_users(frame.f_code.co_filename):
            return Line(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back
    return None


def of_error(trace: TracebackType | None) -> Line | None:
    """The innermost line of the user's that an error went through."""
    users = [
        Line(frame.f_code.co_filename, number, frame.f_code.co_name)
        for frame, number in traceback.walk_tb(trace)
        if is_users(frame.f_code.co_filename)
    ]
    return users[-1] if users else None


def distinct(lines: Iterable[Line | None]) -> list[Line]:
    """Each line once, in the order in which it came."""
    return list(dict.fromkeys(line for line in lines if line is not None))
