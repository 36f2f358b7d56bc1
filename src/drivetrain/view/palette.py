"""One colour per meaning, the same on the page and in the terminal.

After Okabe and Ito's palette, which people with common forms of colour blindness can distinguish.
Greys are for start-up, compilation and idle time. Every colour is shown with a text label.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Colour:
    """One colour, for light and for dark backgrounds."""

    light: str
    dark: str


COLOURS = {
    "productive": Colour("#0072b2", "#3d9bdc"),
    "evaluation": Colour("#00805d", "#2fb892"),
    "data_wait": Colour("#e69f00", "#e8ab2c"),
    "communication": Colour("#56b4e9", "#9ad4f5"),
    "checkpoint": Colour("#cc79a7", "#d891b8"),
    "start_up": Colour("#a3adba", "#8b95a5"),
    "compile": Colour("#77828f", "#b7c0cc"),
    "recovery": Colour("#d55e00", "#ea7a2a"),
    "redone": Colour("#e3c51d", "#f0e442"),
    "stalled": Colour("#8f1d21", "#d2484d"),
    "preempted": Colour("#6b4ea0", "#a78bda"),
    "idle": Colour("#dce1e8", "#3b4450"),
    "compute": Colour("#0072b2", "#3d9bdc"),
    "good": Colour("#00805d", "#2fb892"),
    "bad": Colour("#b3261e", "#f0716a"),
}

UNKNOWN = Colour("#b08f5a", "#c9ab78")


def colour_of(name: str) -> Colour:
    """Return the colour of a meaning, with a default for unknown ones."""
    return COLOURS.get(name, UNKNOWN)


def css_of(name: str) -> str:
    """Return the CSS class of a meaning; unknown names are never put into a page."""
    kept = "".join(letter if letter.isalnum() else "-" for letter in name.lower())
    return f"is-{kept}" if name in COLOURS else "is-unknown"


def words(name: str) -> str:
    """Return the label of a meaning: data_wait → 'data wait'."""
    known = {
        "start_up": "start-up, shut-down",
        "redone": "redone work",
        "checkpoint": "checkpoint stall",
    }
    return known.get(name, name.replace("_", " "))


# Low to high, after ColorBrewer's YlGnBu: even in lightness and safe with colour blindness. High is
# bright on a dark page and dark on a light one, so that it stands out.
_ON_LIGHT = (
    *("#f7fbdc", "#e6f4b6", "#c4e7b5", "#7fcdbb", "#41b6c4"),
    *("#1d91c0", "#225ea8", "#253494", "#081d58"),
)
_ON_DARK = (
    *("#132a4a", "#1c3f74", "#225ea8", "#1d7fb5", "#2fa3bf"),
    *("#57bfbd", "#8dd3b4", "#bfe3a8", "#e4efa6"),
)
SHADES = tuple(Colour(*pair) for pair in zip(_ON_LIGHT, _ON_DARK, strict=True))
