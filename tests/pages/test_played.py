"""The commands of some pages, as the pages show them; `make played` runs those of the others."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.pages.play import differences, played

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["evaluation", "exports", "optimization", "simulate"])
def test_the_commands_of_a_page_end_as_it_says(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torchmetrics")
    pytest.importorskip("transformers")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PAGES", str(ROOT / "docs"))
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    page = (ROOT / "docs" / f"{name}.md").read_text()
    assert differences(page, played(page, tmp_path)) == []
