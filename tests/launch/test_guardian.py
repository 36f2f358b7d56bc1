"""The guardian: what it says and records when its supervisor is killed."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from drivetrain.launch import guardian
from drivetrain.record.run_directory import RunDirectory


def begun(session: Path) -> RunDirectory:
    """A run in which a rank has opened an attempt."""
    run = RunDirectory.at(session / "run")
    run.begin_attempt(1, {"launched_s": 5.0})
    (session / "run-0").write_text(str(run.path))
    (session / "attempt").write_text("1")
    return run


def test_no_restart_is_announced_that_does_not_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = begun(tmp_path)
    one = guardian._Guardian(["train.py"], tmp_path)
    ends = iter([-9] * 10)
    monkeypatch.setattr(one, "_run_once", lambda: next(ends))
    assert one.run() == 128 + signal.SIGKILL
    lines = capsys.readouterr().err.splitlines()
    restarted = [line for line in lines if line.endswith("killed by SIGKILL; restarting it")]
    num_starts = 10 - len(list(ends))
    assert len(restarted) == num_starts - 1 == 5
    assert lines[-1] == (
        "the supervisor was killed by SIGKILL; not restarted: this happened 6 times; to resume, "
        f"run the same command again with --run-dir {run.path} before the script"
    )
    assert run.attempts()[0].end["detail"].startswith("the supervisor was killed by SIGKILL")
    assert run.attempts()[0].end["restarts"] is False, "the last one was not followed by another"
    assert (run.attempt(1) / "closed.json").exists()


def test_a_supervisor_killed_after_it_was_asked_to_stop_leaves_an_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = begun(tmp_path)
    one = guardian._Guardian(["train.py"], tmp_path)
    one.forward(signal.SIGTERM, None)
    monkeypatch.setattr(one, "_run_once", lambda: -9)
    assert one.run() == 128 + signal.SIGKILL
    said = "the supervisor was killed by SIGKILL; not restarted: it was asked to stop\n"
    assert capsys.readouterr().err == said
    assert run.attempts()[0].end["restarts"] is False
