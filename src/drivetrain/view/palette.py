"""One colour per meaning, the same on the page and in the terminal.

After Okabe and Ito's set, which people with any of the common colour blindnesses can tell apart;
greys are for time that is nobody's fault. Every colour has its word beside it wherever it is shown.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Colour:
    """For a light and for a dark background."""

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
    """A meaning that has none yet still shows."""
    return COLOURS.get(name, UNKNOWN)


def css_of(name: str) -> str:
    """The css class of a meaning; names come from our own files, but a page trusts nobody."""
    kept = "".join(letter if letter.isalnum() else "-" for letter in name.lower())
    return f"is-{kept}" if name in COLOURS else "is-unknown"


def words(name: str) -> str:
    """data_wait → 'data wait'."""
    known = {"start_up": "start-up", "redone": "redone work", "checkpoint": "checkpoint stall"}
    return known.get(name, name.replace("_", " "))


# Little to much, after ColorBrewer's YlGnBu: even in lightness, and safe for colour-blind eyes. On
# a dark page much is bright, on a light one dark: it must always stand out from the page.
_ON_LIGHT = (
    *("#f7fbdc", "#e6f4b6", "#c4e7b5", "#7fcdbb", "#41b6c4"),
    *("#1d91c0", "#225ea8", "#253494", "#081d58"),
)
_ON_DARK = (
    *("#132a4a", "#1c3f74", "#225ea8", "#1d7fb5", "#2fa3bf"),
    *("#57bfbd", "#8dd3b4", "#bfe3a8", "#e4efa6"),
)
SHADES = tuple(Colour(*pair) for pair in zip(_ON_LIGHT, _ON_DARK, strict=True))
