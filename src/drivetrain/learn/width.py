"""How wide a learner's terminal is."""

from __future__ import annotations

import shutil

_WIDEST = 96
_NARROWEST = 40


def text_width() -> int:
    """Of the terminal or COLUMNS, up to what reads well; that much, too, where there is none."""
    return max(_NARROWEST, min(_WIDEST, shutil.get_terminal_size((_WIDEST, 24)).columns))
