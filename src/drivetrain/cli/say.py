"""Plain lines from the verbs: what a run's directory says cannot steer a terminal.

With `terminal.py`, which is for tables and colours, the one way out; rich is not loaded for this.
"""

from __future__ import annotations

import sys

from drivetrain.core.text import plain


def say(text: str = "", *, err: bool = False) -> None:
    (sys.stderr if err else sys.stdout).write(plain(text) + "\n")


def hand_on(text: str) -> None:
    """A piece of what was made fit already, as it is, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()
