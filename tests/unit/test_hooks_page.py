"""The page on hooks has every hook, and its example prints what it says."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from drivetrain import Hook

PAGE = (Path(__file__).parents[2] / "docs" / "hooks.md").read_text()


def test_every_hook_stands_there_with_its_arguments() -> None:
    rows = dict(re.findall(r"^\| `(on_\w+)` \| ?`?(\w*)", PAGE, re.MULTILINE))
    ours = {
        name: (list(inspect.signature(value).parameters)[2:] or [""])[0]
        for name, value in vars(Hook).items()
        if name.startswith("on_")
    }
    assert rows == ours


def test_the_example_prints_what_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, said = re.findall(r"```(?:python|text)\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(code, "hooks.md", "exec"), {"__name__": "hooks_page"})  # noqa: S102 - our page
    assert capsys.readouterr().out == said
