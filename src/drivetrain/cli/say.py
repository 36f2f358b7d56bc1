"""Plain output lines: text from a run's directory cannot send control codes to a terminal.

Commands print only through this module and `terminal.py` (tables and colors, with rich, which is
not imported here).
"""

from __future__ import annotations

import sys

from drivetrain.core.text import plain


def say(text: str = "", *, err: bool = False) -> None:
    (sys.stderr if err else sys.stdout).write(plain(text) + "\n")


def hand_on(text: str) -> None:
    """Write text that is already safe for a terminal, and flush."""
    sys.stdout.write(text)
    sys.stdout.flush()
