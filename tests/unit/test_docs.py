from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.pages.play import excerpt, played

PAGE = Path(__file__).parents[2] / "docs" / "config.md"


@pytest.fixture(autouse=True)
def drivetrain_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")


def test_the_page_shows_what_the_commands_really_say(tmp_path: Path) -> None:
    page = PAGE.read_text()
    assert page.count("```console\n$ drivetrain ") >= 10
    assert played(page, tmp_path) == page


def test_a_page_that_has_come_apart_is_noticed(tmp_path: Path) -> None:
    page = "```console\n$ drivetrain config seed=x\nfine\n(exit code 2)\n```\n"
    assert "seed = x: must be a whole number" in played(page, tmp_path)


def test_another_exit_code_than_the_page_shows_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="exit code 2"):
        played("```console\n$ exit 2\n```\n", tmp_path)
    with pytest.raises(SystemExit, match="exit code 0"):
        played("```console\n$ true\n(exit code 2)\n```\n", tmp_path)


def test_an_excerpt_stays_one_and_what_is_no_longer_printed_is_an_error() -> None:
    printed = ["a 1\n", "step 1/9\n", "step 2/9\n", "z 5\n"]
    assert excerpt(("…\n", "step 2/9\n", "z 4\n"), printed) == ["…\n", "step 2/9\n", "z 5\n"]
    with pytest.raises(SystemExit, match="not printed"):
        excerpt(("…\n", "z 5\n", "a 1\n"), printed)


def test_files_are_written_and_unseen_commands_run_before_what_needs_them(tmp_path: Path) -> None:
    page = """```yaml title="a.yaml"\nkey: 1\n```
<!-- play: cp a.yaml b.yaml -->
    ```console
    $ cat b.yaml
    ```
"""
    assert played(page, tmp_path).endswith("    $ cat b.yaml\n    key: 1\n    ```\n")


def test_ctrl_c_is_pressed_where_the_page_presses_it(tmp_path: Path) -> None:
    page = """```console
$ trap 'echo caught; exit 3' INT; echo step 1; for i in 2 3 4 5; do sleep 1; echo step $i; done
step 1
step 2
^C
caught
(exit code 3)
```
"""
    assert played(page, tmp_path) == page


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
