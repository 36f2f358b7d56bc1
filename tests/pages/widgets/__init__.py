"""The lectures' widgets: one HTML page each, put together from the files of this folder.

A page is self-contained: frame.css and frame.js, which all have, and its own three files:
NAME.html (what is seen), NAME.model.js (the arithmetic: no document in it, so that a test can run
it) and NAME.js (the drawing).
"""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
TITLES = {
    "ring": "A ring all-reduce, step by step",
    "pipeline": "A pipeline and its bubble",
    "zero-memory": "Memory per rank, by ZeRO stage",
}
_MODEL = re.compile(r'<script id="model">\n(.*?)</script>', re.DOTALL)


def page(name: str) -> str:
    parts = {
        "TITLE": TITLES[name],
        "STYLE": _read("frame.css"),
        "BODY": _read(f"{name}.html"),
        "MODEL": _read(f"{name}.model.js"),
        "FRAME": _read("frame.js"),
        "DRAWING": _read(f"{name}.js"),
    }
    return re.sub(r"\{\{([A-Z]+)\}\}\n?", lambda found: parts[found[1]], _read("frame.html"))


def model_of(html: str) -> str:
    """The page's arithmetic, as it stands on it."""
    found = _MODEL.search(html)
    if found is None:
        raise ValueError("the page has no script with the id model")
    return found[1]


def _read(name: str) -> str:
    return (HERE / name).read_text()
