"""The command line accepts every `drivetrain …` on a page: its verb, its flags, its config keys.

Nothing is run. Whole pages are run by `make played` and `make applications`, and docs/config.md by
a test of its own.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from drivetrain.cli.main import app
from drivetrain.cli.train import _without_plan
from drivetrain.config.keys import leaf_keys
from drivetrain.core.errors import ConfigError
from drivetrain.launch.request import read_command, read_request

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
]
_OF_BASH = re.compile(r"\s(#|→|>|\||&&|&|;|2>).*$")
_SETTING = re.compile(r"([a-z_]+(?:\.[a-z_]+)+)=")
_REFUSED_ON_PURPOSE = (
    "--hosts bad.txt",  # shows the error
    "--on background",  # a target of the package that the page writes
    "optimization.lerning_rate",
    "optimisation.learning_rate",
)


def commands_of(page: str) -> list[str]:
    """Lines of code blocks that begin with `drivetrain`; where output is shown, with `$`."""
    lines = iter(page.splitlines())
    found, fence = [], ""
    for line in lines:
        if line.lstrip().startswith("```"):
            fence = "" if fence else line.strip()
        elif fence or line.startswith("    "):
            is_output = fence.startswith("```console") and not line.strip().startswith("$ ")
            whole = _joined(line, lines)
            if whole.startswith("drivetrain ") and not is_output:
                found.append(_OF_BASH.sub("", whole))
    return found


def _joined(line: str, following: Iterator[str]) -> str:
    whole = line.strip().removeprefix("$ ")
    while whole.endswith("\\"):
        whole = f"{whole[:-1].rstrip()} {next(following).strip()}"
    return whole


@pytest.fixture(scope="module")
def command_line() -> Any:
    """The whole command line, of which nothing is carried out."""
    root = get_command(app)
    _silence(root)
    return root


def _silence(command: Any) -> None:
    for each in getattr(command, "commands", {}).values():
        _silence(each)
    if not hasattr(command, "commands"):
        command.callback = lambda **_: None


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_of_a_page_is_accepted(
    path: Path, command_line: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hosts.txt").write_text("node-1\nnode-2\n")
    monkeypatch.chdir(tmp_path)
    for command in commands_of(path.read_text()):
        if not any(each in command for each in _REFUSED_ON_PURPOSE):
            check(command_line, shlex.split(command)[1:])


@pytest.mark.parametrize(
    ("command", "error"),
    [
        ("trian train.py", ConfigError),
        ("status --colour runs/a", ConfigError),
        ("train --nprok-per-node 2 train.py", ConfigError),
        ("train train.py optimization.lerning_rate=1", AssertionError),
        ("tune train.py --spaces space.yaml", ConfigError),
    ],
)
def test_a_command_that_went_out_of_date_is_noticed(
    command_line: Any, command: str, error: type[Exception]
) -> None:
    with pytest.raises(error):
        check(command_line, shlex.split(command))


def check(command_line: Any, argv: list[str]) -> None:
    if argv[0] == "train":
        argv, *_ = _without_plan(argv[1:])
        if read_request(argv) is None:
            read_command(argv)
    else:
        command_line.main(argv, standalone_mode=False)
    for key in (found[1] for word in argv if (found := _SETTING.match(word))):
        assert key in leaf_keys(), key
