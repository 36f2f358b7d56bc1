"""Words that others wrote, made fit for a terminal.

A terminal obeys some characters: they clear it, name its window, move the cursor to write over what
stands there, or turn a word around so that it reads as another. In a run's directory they may stand
anywhere that words do.
"""

from __future__ import annotations

import re

_STEERING = r"\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069"
_ANY = re.compile(f"[{_STEERING}]")
_BUT_COLOURS = re.compile(rf"(\x1b\[[0-9;]{{0,40}}m|\r)|[{_STEERING}]")
_SHOWN = "\ufffd"


def plain(text: str) -> str:
    """Without anything that steers a terminal but ends of lines and tabs."""
    return _ANY.sub(_SHOWN, text) if not text.isprintable() else text


def plain_but_coloured(text: str) -> str:
    """The same, for what a run printed: its colours and its progress bars are its own."""
    return _BUT_COLOURS.sub(lambda found: found[1] or _SHOWN, text)
