"""The pages that the code writes are as it would write them today, and the nav has every page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.pages import DOCS, PAGES

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", PAGES)
def test_a_page_says_what_the_code_does(name: str) -> None:
    assert (DOCS / name).read_text() == PAGES[name](), "make pages"


def test_every_key_stands_on_the_page_once() -> None:
    from drivetrain.config.keys import leaf_keys

    page = (DOCS / "config-keys.md").read_text()
    assert [key for key in leaf_keys() if page.count(f"| `{key}` |") != 1] == []


def test_a_reader_is_sent_nowhere_else_for_fonts_or_scripts() -> None:
    site: dict[str, Any] = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    assert site["theme"]["font"] is False
    assert not [each for each in site["extra_css"] if "://" in each]
    assert not site.get("extra_javascript")
