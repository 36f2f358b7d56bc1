"""The frame around a plot: axes whose words keep their size while the drawing stretches.

A drawing is an SVG of 1000 × 1000 units, stretched to whatever room the page has; lines keep their
width (`vector-effect`), and labels are text beside it, placed in per cent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

SIZE = 1000


@dataclass(frozen=True)
class Tick:
    """A word on an axis, at a place between 0 and 1."""

    at: float
    text: str


@dataclass(frozen=True)
class Frame:
    """What stands around a drawing."""

    title: str
    """For those who cannot see it, too."""
    x: Sequence[Tick]
    y: Sequence[Tick]
    height_px: int = 200
    has_grid: bool = True


def framed(drawing: Markup, frame: Frame) -> Markup:
    """The drawing with its axes, as one figure."""
    return Markup(
        '<div class="chart" style="--height:{}px" role="img" aria-label="{}">'
        '<div class="y-axis">{}</div><div class="plot">'
        '<svg viewBox="0 0 {} {}" preserveAspectRatio="none" aria-hidden="true">{}{}</svg></div>'
        '<div class="x-axis">{}</div></div>'
    ).format(
        frame.height_px,
        frame.title,
        _labels(frame.y, "bottom"),
        SIZE,
        SIZE,
        _grid(frame.y) if frame.has_grid else "",
        drawing,
        _labels(frame.x, "left"),
    )


def across(fraction: float) -> str:
    """An x in the drawing, short."""
    return _short(fraction * SIZE)


def up(fraction: float) -> str:
    """A y in the drawing: it counts from the top."""
    return _short((1.0 - fraction) * SIZE)


def box(x: float, y: float, width: float, height: float, css: str, words: str = "") -> Markup:
    """A rectangle in fractions of the drawing, from its upper left; `words` show on hovering."""
    shape = Markup('<rect class="{}" x="{}" y="{}" width="{}" height="{}">').format(
        css, _short(x * SIZE), _short(y * SIZE), _short(width * SIZE), _short(height * SIZE)
    )
    title = Markup("<title>{}</title>").format(words) if words else ""
    return Markup("{}{}</rect>").format(shape, title)


def upright(fraction: float, css: str, words: str = "") -> Markup:
    """A line from top to bottom."""
    title = Markup("<title>{}</title>").format(words) if words else ""
    return Markup('<path class="{}" d="M{} 0V{}">{}</path>').format(
        css, across(fraction), SIZE, title
    )


def legend(entries: Sequence[tuple[str, str]]) -> Markup:
    """Colour and word, in (css class, word)."""
    items = Markup("").join(
        Markup('<li><i class="swatch {}"></i>{}</li>').format(css, word) for css, word in entries
    )
    return Markup('<ul class="legend">{}</ul>').format(items)


def _grid(ticks: Sequence[Tick]) -> Markup:
    lines = "".join(f"M0 {up(tick.at)}H{SIZE}" for tick in ticks if 0 <= tick.at <= 1)
    return Markup('<path class="grid" d="{}"/>').format(lines) if lines else Markup("")


def _labels(ticks: Sequence[Tick], side: str) -> Markup:
    shown = (tick for tick in ticks if -0.001 <= tick.at <= 1.001)
    return Markup("").join(
        Markup('<span style="{}:{}%">{}</span>').format(side, _short(tick.at * 100), tick.text)
        for tick in shown
    )


def _short(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")
