"""Tables and colours from the verbs: what a run's directory says cannot steer a terminal."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from drivetrain.core.text import plain

_WIDTH_OF_FILES = 120
"""A pipe or a file has no width: rich would take 80, and cut words out of tables."""


class _Terminal(Console):
    """rich's console, with words that are only words; rich's own colours are made after this."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Each piece of text on its way out."""
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield Segment(plain(segment.text), segment.style)


def terminal(**settings: Any) -> Console:
    """As rich's Console; numbers and paths in a text get no colours of their own."""
    console = _Terminal(**{"highlight": False, **settings})
    if not (console.is_terminal or "COLUMNS" in os.environ):
        console.width = _WIDTH_OF_FILES
    return console
