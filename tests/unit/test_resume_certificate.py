"""`drivetrain verify resume` on a script that does not repeat itself, or does not exist."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from drivetrain.cli.main import app
from drivetrain.core.errors import ConfigError
from drivetrain.verify import resume
from drivetrain.verify.drills.drill import DrillOutcome

HINT = (
    "a second run without a kill has other weights, too: the script does not repeat itself; "
    "if it draws weights or data itself, call torch.manual_seed at its top"
)


def certify(monkeypatch: pytest.MonkeyPatch, weights: dict[str, str], problem: str = "") -> str:
    """Return what is printed if the runs only leave these weights."""
    names = []

    def run_once(setting: Any, faults: Any, folder: Path) -> DrillOutcome:
        names.append(folder.name)
        return DrillOutcome((), [problem] if problem and folder.name == "killed" else [])

    monkeypatch.setattr(resume, "run_once", run_once)
    monkeypatch.setattr(resume, "checkpoint_problems", lambda _: [])
    monkeypatch.setattr(resume, "weights_fingerprint", lambda run: weights[run.parent.name])
    monkeypatch.setattr(resume, "_resumed_from", lambda _: 1)
    monkeypatch.setattr(resume, "_losses", lambda _: {})
    shown = CliRunner().invoke(app, ["verify", "resume", __file__, "--steps", "4"])
    assert shown.exit_code == int("NOT certified" in shown.output), shown.output
    # the third run is only made if the script may not repeat itself
    assert names == ["whole", "killed"] + ["again"] * shown.exit_code
    return " ".join(shown.output.split())


def test_a_missing_seed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert HINT in certify(monkeypatch, {"whole": "a", "killed": "b", "again": "c"})


def test_it_is_named_if_the_data_differs_and_the_resume_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = certify(monkeypatch, {"whole": "a", "again": "c"}, "exit codes [2]; data.content = 1")
    assert "data.content" in said
    assert HINT in said


def test_a_seed_is_not_blamed_for_a_resume_that_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert HINT not in certify(monkeypatch, {"whole": "a", "killed": "b", "again": "a"})


def test_a_script_that_resumes_exactly_runs_only_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "NOT" not in certify(monkeypatch, {"whole": "a", "killed": "a"})


@pytest.mark.parametrize("command", ["verify resume", "verify parity --layouts ddp:2", "drill"])
def test_a_missing_script_is_refused_before_anything_runs(command: str, tmp_path: Path) -> None:
    for script, rule in ((tmp_path / "x.py", "no such file"), (tmp_path, "a directory, not a")):
        refused = CliRunner().invoke(app, [*command.split(), str(script)]).exception
        assert isinstance(refused, ConfigError)
        assert rule in str(refused)
