"""Pictures as SVG: shapes, charts, bars. Each has a background of its own, so that it can be read
on a light page and on a dark one; its bytes depend on nothing but what is drawn."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

INK, FAINT, PAPER, GRID = "#1d2b28", "#55645f", "#f8fbfa", "#d3dedb"
COLORS = ("#0b6b5d", "#b4540a", "#4453b0", "#a3266b", "#5f6b73")
PALE = ("#bfe3db", "#f6d3b5", "#cdd3f2", "#f0c6dc", "#dde2e5")
_FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"

Point = tuple[float, float]


@dataclass
class Drawing:
    """Shapes in the order in which they were drawn."""

    width: int
    height: int
    title: str
    parts: list[str] = field(default_factory=list)

    def rect(self, x: float, y: float, w: float, h: float, fill: str, line: str = INK) -> None:
        self.parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" rx="3" '
            f'fill="{fill}" stroke="{line}"/>'
        )

    def text(self, x: float, y: float, said: str, anchor: str = "middle", size: int = 13) -> None:
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" '
            f'fill="{INK}">{escape(said)}</text>'
        )

    def label(self, x: float, y: float, said: str, color: str, anchor: str = "start") -> None:
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="13" font-weight="600" '
            f'text-anchor="{anchor}" fill="{color}">{escape(said)}</text>'
        )

    def upright(self, x: float, y: float, said: str) -> None:
        """Text that is read from below, for a y axis."""
        self.parts.append(
            f'<text transform="translate({x:.1f} {y:.1f}) rotate(-90)" font-size="13" '
            f'text-anchor="middle" fill="{INK}">{escape(said)}</text>'
        )

    def line(self, points: Sequence[Point], color: str = INK, width: float = 1.5) -> None:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(
            f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{width}"/>'
        )

    def dot(self, x: float, y: float, color: str) -> None:
        self.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{color}"/>')

    def arrow(self, start: Point, end: Point, color: str = INK) -> None:
        self.line([start, end], color)
        angle = math.atan2(end[1] - start[1], end[0] - start[0])
        wings = [
            (end[0] - 9 * math.cos(angle + turn), end[1] - 9 * math.sin(angle + turn))
            for turn in (0.42, -0.42)
        ]
        shape = " ".join(f"{x:.1f},{y:.1f}" for x, y in (end, *wings))
        self.parts.append(f'<polygon points="{shape}" fill="{color}"/>')

    def svg(self) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" role="img" font-family="{_FONT}">'
        )
        paper = (
            f'<rect width="{self.width}" height="{self.height}" rx="8" fill="{PAPER}" '
            f'stroke="{GRID}"/>'
        )
        return "\n".join(
            [head, f"<title>{escape(self.title)}</title>", paper, *self.parts, "</svg>\n"]
        )


@dataclass(frozen=True)
class Axis:
    """From the first tick to the last."""

    title: str
    ticks: tuple[float, ...]
    names: tuple[str, ...] = ()
    is_log: bool = False

    def place(self, value: float) -> float:
        """0 at the first tick, 1 at the last."""
        scale: Callable[[float], float] = math.log if self.is_log else float
        low, high = scale(self.ticks[0]), scale(self.ticks[-1])
        return (scale(value) - low) / (high - low)

    def named(self) -> list[tuple[float, str]]:
        names = self.names or tuple(f"{tick:g}" for tick in self.ticks)
        return list(zip(self.ticks, names, strict=True))


@dataclass(frozen=True)
class Curve:
    """A line with its name; `dots` marks measured points."""

    name: str
    points: tuple[Point, ...]
    dots: bool = False


_LEFT, _TOP, _WIDE, _HIGH = 70, 40, 430, 270


def chart(title: str, across: Axis, up: Axis, curves: Sequence[Curve]) -> str:
    """Lines over two axes, their names to the right."""
    drawing = Drawing(760, 380, title)
    drawing.text(_LEFT, 24, title, "start", 15)

    def at(point: Point) -> Point:
        return _LEFT + across.place(point[0]) * _WIDE, _TOP + (1 - up.place(point[1])) * _HIGH

    for tick, name in across.named():
        x, _ = at((tick, up.ticks[0]))
        drawing.line([(x, _TOP), (x, _TOP + _HIGH)], GRID, 1)
        drawing.text(x, _TOP + _HIGH + 19, name)
    for tick, name in up.named():
        _, y = at((across.ticks[0], tick))
        drawing.line([(_LEFT, y), (_LEFT + _WIDE, y)], GRID, 1)
        drawing.text(_LEFT - 8, y + 4, name, "end")
    drawing.text(_LEFT + _WIDE / 2, 362, across.title)
    drawing.upright(18, _TOP + _HIGH / 2, up.title)
    for index, curve in enumerate(curves):
        color = COLORS[index % len(COLORS)]
        inside = [
            p
            for p in curve.points
            if up.ticks[0] <= p[1] <= up.ticks[-1] and across.ticks[0] <= p[0] <= across.ticks[-1]
        ]
        drawing.line([at(p) for p in inside], color, 2.5)
        if curve.dots:
            for point in inside:
                drawing.dot(*at(point), color)
        y = _TOP + 14 + 26 * index
        drawing.line([(_LEFT + _WIDE + 18, y - 4), (_LEFT + _WIDE + 42, y - 4)], color, 3)
        drawing.text(_LEFT + _WIDE + 48, y, curve.name, "start")
    return drawing.svg()


@dataclass(frozen=True)
class Bar:
    """Parts one after the other, and what stands at its end."""

    name: str
    parts: tuple[float, ...]
    said: str


def bars(title: str, parts: Sequence[str], rows: Sequence[Bar]) -> str:
    """Rows of bars, cut into named parts."""
    drawing = Drawing(760, 84 + 40 * len(rows), title)
    drawing.text(20, 24, title, "start", 15)
    left, wide = 190, 430
    x = float(left)
    for index, name in enumerate(parts):
        drawing.rect(x, 38, 13, 13, PALE[index], COLORS[index])
        drawing.text(x + 19, 49, name, "start")
        x += 40 + 7.4 * len(name)
    largest = max(sum(row.parts) for row in rows)
    for number, row in enumerate(rows):
        y = 66 + 40 * number
        drawing.text(left - 10, y + 18, row.name, "end")
        x = float(left)
        for index, part in enumerate(row.parts):
            width = wide * part / largest
            drawing.rect(x, y, width, 26, PALE[index], COLORS[index])
            x += width
        drawing.text(x + 8, y + 18, row.said, "start")
    return drawing.svg()
