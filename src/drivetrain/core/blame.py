"""Whose code raised an error, said with the error: in its traceback, whoever prints it.

It is a note of the exception: its type stays what the user raised and may catch, and the note
comes with the text of a data worker's error too, where an attribute would be lost.
"""

from __future__ import annotations

import contextlib
import re

from drivetrain.core.errors import DrivetrainError

_NOTE = "raised by "
_NOTED = re.compile(r"^raised by (?P<who>.+)$", re.MULTILINE)


def blame(error: BaseException, who: str) -> None:
    """Say who raised it; what was said first, further inside, stays."""
    if isinstance(error, DrivetrainError):  # says what to do by itself
        return
    with contextlib.suppress(Exception):  # an error may be unable to say what it is
        if not raised_by("\n".join((*getattr(error, "__notes__", ()), str(error)))):
            error.add_note(f"{_NOTE}{who}")


def raised_by(text: str) -> str:
    """Who is blamed in a traceback; empty when nobody is."""
    found = _NOTED.search(text)
    return found["who"] if found else ""


def without_blame(text: str) -> str:
    """A traceback that ends with its exception, as Python has it."""
    return _NOTED.sub("", text).rstrip("\n")
