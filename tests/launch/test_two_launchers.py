"""Two launchers on one run: the second is refused, and touches nothing."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from drivetrain.core import locks
from drivetrain.launch import guardian
from drivetrain.launch.guardian import only_launcher


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    script = folder / "script.py"
    script.write_text("import time; print('runs', flush=True); time.sleep(30)")
    return subprocess.Popen(
        [sys.executable, "-m", "drivetrain", "train", "--run-dir", "run", *words, str(script)],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_second_is_refused_and_the_first_is_named(tmp_path: Path) -> None:
    first = start(tmp_path)
    assert first.stdout is not None
    assert first.stdout.readline() == "runs\n"
    before = sorted((tmp_path / "run").rglob("*"))
    second = start(tmp_path)
    said = second.communicate(timeout=30)[1]
    assert second.returncode == 2
    assert said.count("\n") == 1, said
    assert f"is being run by process {first.pid} on {socket.gethostname()}" in said
    assert sorted((tmp_path / "run").rglob("*")) == before
    first.kill()  # however it ends, the run is free again
    first.communicate()
    with only_launcher(["--run-dir", str(tmp_path / "run"), "script.py"]):
        pass


def words(run: Path, *flags: str) -> list[str]:
    return [f"--run-dir={run}", *flags, "script.py"]


def test_nodes_of_one_run_do_not_shut_each_other_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    several = words(tmp_path / "run", "--nnodes=2")
    alone = words(tmp_path / "run")
    with only_launcher(several), only_launcher(several):
        assert guardian.guard(alone) == 2
    monkeypatch.setenv("PET_NNODES", "2")
    with only_launcher(alone), only_launcher(alone):
        pass


def test_a_launcher_on_another_host_may_have_died_with_it_and_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file server frees the lock of a host that is gone after a while: its lease."""
    monkeypatch.setattr(guardian, "_LEASE_S", 5.0)
    run = tmp_path / "run"
    run.mkdir()
    lock = locks.hold(run / "launcher.lock")
    assert lock is not None
    (run / "launcher.lock").write_text("elsewhere 7")
    began_s = time.monotonic()
    monkeypatch.setattr(guardian, "_POLL_S", 0.05)
    monkeypatch.setattr(time, "sleep", lambda _: lock.close())
    with only_launcher(words(run)):
        assert time.monotonic() - began_s < 5
    assert "process 7 on elsewhere" in capsys.readouterr().err


def test_without_locks_the_run_goes_on_and_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(38, os.strerror(38))

    monkeypatch.setattr("fcntl.flock", no_locks)
    with only_launcher(words(tmp_path / "run")):
        pass
    assert "does not support locks (flock: Function not implemented)" in capsys.readouterr().err


def test_words_that_name_no_run_or_are_wrong_lock_nothing(tmp_path: Path) -> None:
    for some in (["script.py"], ["--no-such-flag"], []):
        with only_launcher(some):
            pass
    assert not list(tmp_path.iterdir())
