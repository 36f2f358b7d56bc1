"""`stop` and `resume` on a directory that somebody else could write."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from drivetrain.core.errors import ConfigError, DamagedRun, DrivetrainError
from drivetrain.launch import submission
from drivetrain.launch.coordinator import coordinated
from drivetrain.launch.job import Job
from drivetrain.launch.targets.hosts import read_hosts


def _job(run: Path, **changes: Any) -> dict[str, Any]:
    job = Job("x", "s.py", (), (), str(run), "/", grace_s=1.0)
    return {**dataclasses.asdict(job), **changes}


def _write(run: Path, **changes: Any) -> Path:
    run.mkdir(exist_ok=True)
    values = {
        "target": {"name": "local"},
        "job": _job(run),
        "id": f"{socket.gethostname()}:1",
        "submitted_at": "",
        "is_stopped": False,
        **changes,
    }
    (run / "job.json").write_text(json.dumps(values))
    (run / "job.yaml").write_text("grace_s: 0\nmembers: []\n")
    return run


@pytest.fixture(autouse=True)
def no_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is wrong with the code: 0 and -1 are whole groups of processes, and all of them."""
    real = os.kill

    def kill(pid: int, number: int) -> None:
        assert pid > 1, f"kill({pid}) reaches processes that nobody named"
        real(pid, number)

    monkeypatch.setattr(os, "kill", kill)


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def test_stop_signals_no_process_that_is_not_the_runs_coordinator(
    tmp_path: Path, victim: subprocess.Popen[bytes]
) -> None:
    run = _write(tmp_path / "run")
    with (run / "conductor.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write(f"{socket.gethostname()} {victim.pid}")
        lock.flush()
        with pytest.raises(DrivetrainError, match="is not the coordinator of this run"):
            submission.stop(run)
    time.sleep(0.1)
    assert victim.poll() is None


def test_stop_signals_no_coordinator_of_another_run(tmp_path: Path) -> None:
    mine, other = _write(tmp_path / "mine"), _write(tmp_path / "other")
    words = ["-c", "import time; time.sleep(60)", "drivetrain.launch.coordinator.coordinator"]
    other_coordinator = subprocess.Popen([sys.executable, *words, str(other)])
    try:
        while coordinated.read_command(other_coordinator.pid)[-1] != str(other):
            time.sleep(0.01)
        with pytest.raises(DrivetrainError, match="is not the coordinator of this run"):
            coordinated.signal_coordinator(mine, other_coordinator.pid)
        assert other_coordinator.poll() is None
        coordinated.signal_coordinator(other, other_coordinator.pid)
        assert other_coordinator.wait(10) != 0
    finally:
        other_coordinator.kill()
        other_coordinator.wait()


@pytest.mark.parametrize("text", ["", "x", "a b c", "host -1", "host 0", "host 1", "host 9e9"])
def test_a_lock_that_names_nobody_is_no_reason_to_signal(tmp_path: Path, text: str) -> None:
    run = _write(tmp_path / "run")
    with (run / "conductor.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write(text.replace("host", socket.gethostname()))
        lock.flush()
        with pytest.raises(DrivetrainError):
            submission.stop(run)


@pytest.mark.parametrize("act", [submission.stop, submission.resume])
def test_what_somebody_else_wrote_is_not_acted_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: Any
) -> None:
    run = _write(tmp_path / "run")
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    with pytest.raises(ConfigError, match="job.json belongs to .*--trust"):
        act(run)


@pytest.mark.parametrize("act", [submission.stop, submission.resume])
def test_what_others_could_have_changed_is_not_acted_on(tmp_path: Path, act: Any) -> None:
    run = _write(tmp_path / "run")
    (run / "job.json").chmod(0o666)
    with pytest.raises(ConfigError, match="job.json can be written by others.*--trust"):
        act(run)


def test_the_job_of_another_directory_is_not_stopped_by_its_copy(tmp_path: Path) -> None:
    _write(tmp_path / "elsewhere")
    run = _write(tmp_path / "run", job=_job(tmp_path / "elsewhere"))
    before = (tmp_path / "elsewhere" / "job.json").read_text()
    with pytest.raises(ConfigError, match="is a copy of"):
        submission.stop(run)
    assert (tmp_path / "elsewhere" / "job.json").read_text() == before


def test_job_json_is_written_for_its_owner_alone_to_change(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        run = _write(tmp_path / "run")
        (run / "job.json").chmod(0o600)
        submission.stop(run)  # nobody is at work: only noted
    finally:
        os.umask(old)
    assert (run / "job.json").stat().st_mode & 0o022 == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"id": "--all"},
        {"id": 5},
        {"id": "a\nb"},
        {"target": {}},
        {"target": []},
        {"target": {"name": "nowhere"}},
        {"target": {"name": "hosts", "ssh": 5}},
        {"job": {}},
        {"job": _job(Path("/r"), grace_s=-30.0)},
        {"job": _job(Path("/r"), grace_s="soon")},
        {"job": _job(Path("/r"), num_nodes="many")},
        {"job": _job(Path("/r"), extra=1)},
        {"job": _job(Path("/r"), script_args="abc")},
        {"is_stopped": "perhaps"},
    ],
)
def test_a_wrong_job_is_one_sentence(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises((DamagedRun, ConfigError)):
        submission.find(_write(tmp_path / "run", **changes))


@pytest.mark.parametrize("text", ["", "[]", "{", "5", "[" * 100_000])
def test_a_job_that_cannot_be_read_is_one_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "job.json").write_text(text)
    with pytest.raises(DamagedRun, match="job.json"):
        submission.find(tmp_path)


@pytest.mark.parametrize("name", ["-oProxyCommand=x", "a;b", "a$(b)", "user@-h", "a\x1bb", "é"])
def test_a_machine_has_a_machines_name(tmp_path: Path, name: str) -> None:
    (tmp_path / "hosts").write_text(f"{name} slots=2\n")
    with pytest.raises(ConfigError, match="not a host name"):
        read_hosts(tmp_path / "hosts")


@pytest.mark.parametrize("name", ["node-a", "me@node_b.example.org", "10.0.0.2", "fe80::1%eth0"])
def test_machines_as_ssh_knows_them(tmp_path: Path, name: str) -> None:
    (tmp_path / "hosts").write_text(f"{name} slots=2\n")
    assert read_hosts(tmp_path / "hosts")[0].name == name
