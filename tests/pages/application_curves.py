"""The applications' expected curves, one small chart each, from their committed `curve*.json`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tests.pages.svg import COLORS, GRID, Drawing, Point

APPLICATIONS = Path(__file__).parents[2] / "examples" / "applications"
_NUM_COLUMNS, _WIDE, _HIGH = 3, 175, 120
_CELL_WIDE, _CELL_HIGH = 260, 205


@dataclass(frozen=True)
class _Expected:
    name: str
    metric: str
    steps: tuple[int, ...]
    curves: tuple[tuple[float, ...], ...]

    @property
    def low(self) -> float:
        return min(min(curve) for curve in self.curves)

    @property
    def high(self) -> float:
        return max(max(curve) for curve in self.curves)


def expected_curves() -> str:
    """Every seed is a line; each chart has a scale of its own."""
    found = [_read(path) for path in sorted(APPLICATIONS.glob("*/curve*.json"))]
    num_rows = -(-len(found) // _NUM_COLUMNS)
    title = "Expected curves of the applications: one line for each seed"
    drawing = Drawing(_NUM_COLUMNS * _CELL_WIDE, 40 + num_rows * _CELL_HIGH, title)
    drawing.text(20, 26, title, "start", 15)
    for number, each in enumerate(found):
        left = 60 + _CELL_WIDE * (number % _NUM_COLUMNS)
        top = 76 + _CELL_HIGH * (number // _NUM_COLUMNS)
        _chart(drawing, each, left, top)
    return drawing.svg()


def _read(path: Path) -> _Expected:
    stored = json.loads(path.read_text())
    variant = path.stem.removeprefix("curve").removeprefix("-")
    return _Expected(
        name=path.parent.name + (f", {variant}" if variant else ""),
        metric=stored["metric"],
        steps=tuple(stored["steps"]),
        curves=tuple(map(tuple, stored["curves"])),
    )


def _chart(drawing: Drawing, each: _Expected, left: float, top: float) -> None:
    def at(step: int, value: float) -> Point:
        x = left + _WIDE * (step - each.steps[0]) / (each.steps[-1] - each.steps[0])
        return x, top + _HIGH * (each.high - value) / (each.high - each.low)

    drawing.label(left, top - 12, each.name, COLORS[0])
    drawing.rect(left, top, _WIDE, _HIGH, "#ffffff", GRID)
    for value in (each.low, each.high):
        drawing.text(left - 6, at(each.steps[0], value)[1] + 4, f"{value:.3g}", "end", 11)
    for step in (each.steps[0], each.steps[-1]):
        drawing.text(at(step, each.low)[0], top + _HIGH + 16, f"{step:,}", size=11)
    drawing.text(left + _WIDE / 2, top + _HIGH + 32, f"{each.metric} by step", size=12)
    for curve in each.curves:
        points = [at(step, value) for step, value in zip(each.steps, curve, strict=True)]
        drawing.line(points, COLORS[0])
