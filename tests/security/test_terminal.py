"""Words out of a run's directory reach a terminal as words: none of them steers it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from rich.padding import Padding
from rich.table import Table
from typer.testing import CliRunner

from drivetrain.cli import main as cli
from drivetrain.cli.terminal import terminal
from drivetrain.core.errors import ConfigError, DrivetrainError
from drivetrain.core.text import plain, plain_but_coloured
from tests.unit.test_status import write_run

TITLE = "\x1b]0;owned\x07"
ESCAPES = f"{TITLE}\x1b[2J\x1b[31mred\x9b31m\x08\x7f\r\u202egnp.exe\u2066"
COLOURED = re.compile(r"\x1b\[[0-9;]*m")


def _steers(text: str) -> list[str]:
    """What is left of a text that a terminal would obey; our own colours are fine."""
    return re.findall(
        r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", COLOURED.sub("", text)
    )


def _hostile(path: Path) -> Path:
    run = write_run(path, kind=f"failed{ESCAPES}", time_s=1020.0, detail=f"why{ESCAPES}")
    run.write_run_yaml(
        json.dumps({"config": {"max_steps": 20, f"k{ESCAPES}": f"v{ESCAPES}"}, "sources": {}})
    )
    start = run.attempt(1) / "start.json"
    facts = json.loads(start.read_text())
    facts |= {"host": f"h{ESCAPES}", "layout": f"l{ESCAPES}", "device_name": f"d{ESCAPES}"}
    start.write_text(json.dumps(facts))
    with run.events(0).open("a") as file:
        scalars = {f"val/{ESCAPES}": 1.0, f"train/{ESCAPES}": 2.0}
        event = {"kind": "scalars", "step": 9, "time_s": 1019.0, "values": scalars}
        file.write(json.dumps(event) + "\n")
        fields = {f"f{ESCAPES}": ESCAPES}
        event = {"kind": "instant", "name": f"n{ESCAPES}", "time_s": 1019.0, "fields": fields}
        file.write(json.dumps(event) + "\n")
    return run.path


@pytest.mark.parametrize("verb", ["status", "runs", "watch", "diagnose", "compare", "ls"])
def test_no_verb_lets_a_run_steer_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    run = str(_hostile(tmp_path / f"run{ESCAPES}".replace("\x00", "")))
    (Path(run) / "checkpoints" / "step-000000001-a1").mkdir(parents=True)
    (Path(run) / "checkpoints" / "step-000000001-a1" / "manifest.json").write_text(ESCAPES)
    words = {
        "runs": ["runs", str(tmp_path)],
        "watch": ["watch", run, "--once"],
        "compare": ["compare", run, run],
        "ls": ["checkpoint", "ls", run],
    }.get(verb, [verb, run])
    result = CliRunner().invoke(cli.app, words)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert result.output.strip()
    assert _steers(result.output) == []


@pytest.mark.parametrize("error", [ConfigError, DrivetrainError])
def test_an_error_does_not_steer_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: type[Exception]
) -> None:
    def fail() -> None:
        raise error([ESCAPES] if error is ConfigError else f"two\nlines {ESCAPES}")

    monkeypatch.setattr(cli, "with_flags_of", lambda *_: fail)
    with pytest.raises(SystemExit):
        cli.main()
    assert _steers(capsys.readouterr().err) == []


def test_what_a_run_printed_keeps_its_colours_and_nothing_else() -> None:
    said = f"\x1b[1;32mstep 1\x1b[0m\r\n50%\rdone\t{ESCAPES}"
    shown = plain_but_coloured(said)
    assert shown.startswith("\x1b[1;32mstep 1\x1b[0m\r\n50%\rdone\t")
    assert "\x1b]" not in shown
    assert "\x1b[2J" not in shown
    assert "\x9b" not in shown


def test_plain_words_stay_as_they_are() -> None:
    said = "naïve 学習 step\n\tloss 0.5 → 🙂"
    assert plain(said) == said
    assert "\x1b" not in plain(ESCAPES)


def test_the_terminal_still_has_colours(capsys: pytest.CaptureFixture[str]) -> None:
    console = terminal(file=sys.stdout, force_terminal=True, color_system="standard")
    console.print("[bold]x[/bold]")
    assert "\x1b[1mx" in capsys.readouterr().out


def test_lines_in_a_pipe_do_not_end_in_blanks(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("name", "size", box=None)
    table.add_row("a longer name", "1")
    console = terminal()
    console.print(table)
    console.print(Padding("a wrapped line " * 12, (0, 0, 0, 2)))
    console.print("asked: ", end="")
    lines = capsys.readouterr().out.split("\n")
    assert [line for line in lines[:-1] if line != line.rstrip()] == []
    assert [line.split() for line in lines[:2]] == [["name", "size"], ["a", "longer", "name", "1"]]
    assert lines[-1] == "asked: "


def test_every_verb_speaks_through_it() -> None:
    source = Path(cli.__file__).parent
    for path in source.rglob("*.py"):
        if path.name not in ("terminal.py", "say.py"):
            found = re.findall(r"(?<![\w.])(?:Console\(|typer\.echo\(|print\()", path.read_text())
            assert not found, f"{path.name} writes to the terminal by itself: {found}"
