"""`python -m tests.pages.lectures [CHAPTER …]`: run the lectures' code, write what it prints.

Every block marked `python` is run, those of a chapter one after the other in one namespace; a block
marked `text` right after it is what it printed.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from pathlib import Path
from typing import Any

import torch

LECTURES = Path(__file__).parents[2] / "docs" / "lectures"
_BLOCK = re.compile(r"```python\n(.*?)```\n(?:\n```text\n(.*?)```\n)?", re.DOTALL)
_FENCED = re.compile(r"```.*?```", re.DOTALL)


def chapters() -> list[Path]:
    return sorted(LECTURES.glob("[0-9]*.md"))


def refreshed(page: str) -> str:
    """The page with what its code prints today."""
    names: dict[str, Any] = {"__name__": "lecture"}

    def with_output(block: re.Match[str]) -> str:
        said = _printed(block[1], names)
        return f"```python\n{block[1]}```\n" + (f"\n```text\n{said}```\n" if said else "")

    num_threads = torch.get_num_threads()
    try:
        with torch.random.fork_rng(devices=[]):
            return _BLOCK.sub(with_output, page)
    finally:
        torch.set_num_threads(num_threads)


def _printed(code: str, names: dict[str, Any]) -> str:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(code, "lecture", "exec", dont_inherit=True), names)  # noqa: S102  our own pages
    return said.getvalue()


def num_words(page: str) -> int:
    """Of the prose: code and what it prints are left out."""
    return len(re.findall(r"[^\W_]+(?:['’.,-][^\W_]+)*", _FENCED.sub("", page)))


if __name__ == "__main__":
    for path in [Path(name) for name in sys.argv[1:]] or chapters():
        path.write_text(refreshed(path.read_text()))
        print(path.name, num_words(path.read_text()), "words")
