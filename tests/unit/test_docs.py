from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.console_blocks import BLOCK, output_of, refreshed

PAGE = Path(__file__).parents[2] / "docs" / "config.md"


def test_the_page_shows_what_the_commands_really_say() -> None:
    page = PAGE.read_text()
    assert len(BLOCK.findall(page)) >= 10
    assert refreshed(page) == page


def test_a_page_that_has_come_apart_is_noticed() -> None:
    page = "```console\n$ drivetrain config seed=x\nfine\n```\n"
    assert refreshed(page) != page
    assert "seed = x: must be a whole number" in output_of("drivetrain config seed=x")


def site_hooks() -> Any:
    pytest.importorskip("griffe")  # only the site needs it
    path = PAGE.parents[1] / ".ci" / "site_hooks.py"
    spec = importlib.util.spec_from_file_location("site_hooks", path)
    assert spec is not None
    assert spec.loader is not None
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    return hooks


def test_the_reference_as_text_has_signatures_and_docstrings() -> None:
    text = site_hooks().readable((PAGE.parent / "reference.md").read_text())
    assert ":::" not in text
    assert "### drivetrain.Task\n\n```python\nTask(model: Callable[[], nn.Module], loss:" in text
    assert "- `fit(" in text
    assert "- `log(values: Mapping[str, Any]) -> None`: Record your own numbers" in text
    assert "- `loss: float`\n" in text, "a field without a docstring"
    assert "- `exit_code = 5`" in text


def test_other_pages_stay_as_they_are() -> None:
    page = PAGE.read_text()
    assert site_hooks().readable(page) == page
