"""Tables and colours from the verbs: what a run's directory says cannot steer a terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from drivetrain.core.text import plain


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
    return _Terminal(**{"highlight": False, **settings})
