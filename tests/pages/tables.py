"""Measured tables in pages, as benchmarks/results has them.

    <!-- table: axes/table.md -->    the first table of that file; `scale/table.md 2` is its second
    | … |
    <!-- end of table -->

`python -m tests.pages.tables` brings all pages up to date. What the text around a table says of
its figures is written by people: read it again then.
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.pages import DOCS

_RESULTS = DOCS.parent / "benchmarks/results"
PLACE = re.compile(
    r"(?P<begin><!-- table: (?P<file>\S+)(?: (?P<number>\d+))? -->\n\n)"
    r".*?(?P<end>\n\n<!-- end of table -->)",
    re.DOTALL,
)


def with_tables(page: str, results: Path = _RESULTS) -> str:
    """The page with its tables as the results have them now."""

    def filled(place: re.Match[str]) -> str:
        found = tables((results / place["file"]).read_text())
        return place["begin"] + found[int(place["number"] or 1) - 1] + place["end"]

    return PLACE.sub(filled, page)


def tables(text: str) -> list[str]:
    """Every Markdown table in it."""
    return re.findall(r"^\|.*(?:\n\|.*)*", text, re.MULTILINE)


def main() -> None:
    for path in sorted(DOCS.rglob("*.md")):
        page = path.read_text()
        if (now := with_tables(page)) != page:
            path.write_text(now)
            print(path.relative_to(DOCS.parent))


if __name__ == "__main__":
    main()
