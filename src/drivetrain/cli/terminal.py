"""Tables and colors: text from a run's directory cannot send control codes to a terminal."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from drivetrain.core.text import plain

_WIDTH_OF_FILES = 120
"""A pipe or a file has no width: rich would assume 80 columns, and truncate tables."""

_FILLED = re.compile(r" +(?=\n)")


class _Terminal(Console):
    """rich's console without control codes in text; rich adds its own colors after this."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:

        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield Segment(plain(segment.text), segment.style)

    def print(self, *objects: Any, **settings: Any) -> None:
        """Print; in a pipe or a file without the blanks with which rich fills lines."""
        if self.is_terminal:
            super().print(*objects, **settings)
            return
        with self.capture() as captured:
            super().print(*objects, **settings)
        self.file.write(_FILLED.sub("", captured.get()))
        self.file.flush()


def terminal(**settings: Any) -> Console:
    """A rich Console that does not highlight numbers and paths in text."""
    console = _Terminal(**{"highlight": False, **settings})
    if not (console.is_terminal or "COLUMNS" in os.environ):
        console.width = _WIDTH_OF_FILES
    return console
