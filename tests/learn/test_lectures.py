"""The lectures: their code runs and prints what is shown, and links and pictures exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.pages.lectures import chapters, num_words, refreshed


@pytest.mark.parametrize("chapter", chapters(), ids=lambda path: path.stem)
def test_code_prints_what_the_page_shows(chapter: Path) -> None:
    page = chapter.read_text()
    assert refreshed(page) == page, f"python -m tests.pages.lectures {chapter}"


@pytest.mark.parametrize("chapter", chapters(), ids=lambda path: path.stem)
def test_a_chapter_is_as_long_as_promised(chapter: Path) -> None:
    assert 3500 <= num_words(chapter.read_text()) <= 5500


@pytest.mark.parametrize("chapter", chapters(), ids=lambda path: path.stem)
def test_what_a_chapter_points_to_exists(chapter: Path) -> None:
    targets = re.findall(r"\]\(((?!https?://)[^)#\s]+)", chapter.read_text())
    assert targets
    assert [each for each in targets if not (chapter.parent / each).exists()] == []
    cited = re.findall(r"`(benchmarks/[\w./-]+)`", chapter.read_text())
    root = Path(__file__).parents[2]
    assert [each for each in cited if not (root / each).exists()] == []


def test_a_page_that_shows_something_else_is_noticed() -> None:
    page = "```python\nprint(1 + 1)\n```\n\n```text\n3\n```\n"
    assert refreshed(page) == page.replace("3", "2")
