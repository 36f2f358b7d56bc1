"""How wide a learner's terminal is."""

from __future__ import annotations

import shutil

_WIDEST = 96
_NARROWEST = 40


def text_width() -> int:
    """Return the width of the terminal (or COLUMNS) within the limits; _WIDEST without one."""
    return max(_NARROWEST, min(_WIDEST, shutil.get_terminal_size((_WIDEST, 24)).columns))
