"""Secrets given by --env: in a file of one's own and in the ranks' environment, nowhere else."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from drivetrain.core.errors import ConfigError
from drivetrain.launch import ownership, submission
from drivetrain.launch.coordinator import stdin_watchdog
from drivetrain.launch.coordinator.coordinator import coordinate
from drivetrain.launch.coordinator.member import FILE, FROM_STDIN, Member, Members
from drivetrain.launch.job import Job
from drivetrain.launch.request import Request, read_request
from drivetrain.launch.target import State, Status
from drivetrain.launch.targets.local import Local
from drivetrain.launch.targets.ray import worker
from drivetrain.launch.targets.slurm import Slurm

SECRET = "0123abcd" + "it's $ecret\nof two lines"
WORDS = ("--env", f"WANDB_API_KEY={SECRET}", "--env", "NCCL_DEBUG=WARN", "train.py")


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").touch()
    (tmp_path / "hosts").write_text("node-a\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def asked(*words: str) -> Request:
    request = read_request([*words, "--run-dir=run", *WORDS])
    assert request is not None
    return request


def submitted(monkeypatch: pytest.MonkeyPatch, kind: type[object], request: Request) -> Path:
    monkeypatch.setattr(kind, "submit", lambda *_: "1")
    submission.submit(request.target, request.job)
    return Path(request.job.run_dir)


@pytest.mark.parametrize("target", ["slurm", "local", "hosts", "ray"])
def test_no_file_but_one_has_the_secret_and_that_is_its_owners(
    target: str, desk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = asked(f"--on={target}", *(["--hosts=hosts"] if target == "hosts" else []))
    assert "0123abcd" not in request.target.render(request.job).text
    assert "0123abcd" not in str(request.target.render(request.job).command)
    assert "0123abcd" not in str(request.job)
    run = submitted(monkeypatch, type(request.target), request)
    holding = [path for path in run.iterdir() if "0123abcd" in path.read_text()]
    assert [path.name for path in holding] == ["job.env"]
    assert stat.S_IMODE(holding[0].stat().st_mode) == 0o600
    found = submission.load(run).job
    assert dict(found.secrets) == {"WANDB_API_KEY": SECRET}
    assert dict(found.environment) == {"NCCL_DEBUG": "WARN"}


def test_slurms_script_brings_it_to_the_ranks(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = submitted(monkeypatch, Slurm, asked("--on=slurm"))
    tools = desk / "tools"
    tools.mkdir()
    for name, line in {"srun": "printenv WANDB_API_KEY", "squeue": "true"}.items():
        (tools / name).write_text(f"#!/bin/sh\n{line}\n")
        (tools / name).chmod(0o755)
    env = {"PATH": f"{tools}:{os.environ['PATH']}", "SLURM_JOB_ID": "1"}
    script = ["bash", str(run / "job.sh")]
    done = subprocess.run(script, env=env, capture_output=True, text=True, check=True)
    assert done.stdout == SECRET + "\n"
    (run / "job.env").unlink()
    done = subprocess.run(script, env=env, capture_output=True, text=True, check=False)
    assert done.returncode != 0, "it must not train without what it was given"


def test_a_member_is_told_over_its_standard_input(tmp_path: Path) -> None:
    code = "import sys; open(sys.argv[1], 'w').write(sys.stdin.readline())"
    command = (sys.executable, "-c", code, str(tmp_path / "told"))
    (tmp_path / FILE).write_text(Members((Member("here", command),), 1.0).text())
    ownership.write_secrets(tmp_path, (("WANDB_API_KEY", SECRET),))
    assert coordinate(tmp_path) == 0
    assert json.loads((tmp_path / "told").read_text()) == {"WANDB_API_KEY": SECRET}


def test_the_leash_takes_the_first_line_and_holds_on_to_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    reader, writer = os.pipe()
    os.write(writer, json.dumps({"WANDB_API_KEY": SECRET}).encode() + b"\nstop")
    assert stdin_watchdog.variables_from(reader) == {"WANDB_API_KEY": SECRET}
    assert os.read(reader, 10) == b"stop"
    os.close(writer)
    assert stdin_watchdog.variables_from(reader) is None
    os.close(reader)


def test_hosts_and_local_ask_for_the_line_only_when_there_is_one(desk: Path) -> None:
    assert FROM_STDIN in Local().render(asked("--on=local").job).text
    plain = dataclasses.replace(asked("--on=local").job, secrets=())
    assert FROM_STDIN not in Local().render(plain).text


def test_a_ray_worker_reads_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ownership.write_secrets(tmp_path, (("WANDB_API_KEY", SECRET),))
    assert ownership.read_secrets(tmp_path) == {"WANDB_API_KEY": SECRET}
    assert ownership.read_secrets(tmp_path / "none") == {}
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    seen: list[str] = []

    def run_argv(_: list[str]) -> int:
        seen.append(os.environ["WANDB_API_KEY"])
        return 0

    monkeypatch.setattr(worker, "run_argv", run_argv)
    worker.run_script({"run_dir": str(tmp_path), "working_dir": str(tmp_path), "argv": []})
    assert seen == [SECRET]


def test_a_run_is_not_resumed_without_its_secrets(
    desk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = submitted(monkeypatch, Slurm, asked("--on=slurm"))
    monkeypatch.setattr(Slurm, "poll", lambda *_: Status(State.FAILED))
    (run / "job.env").unlink()
    with pytest.raises(ConfigError, match=r"WANDB_API_KEY.*--env WANDB_API_KEY"):
        submission.resume(run)


@pytest.mark.parametrize("words", [["--password=hunter2"], ["--pass", "hunter2"]])
def test_files_with_a_secret_in_the_scripts_arguments_are_the_owners(
    words: list[str], desk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = read_request(["--on=slurm", "--run-dir=run", "train.py", *words])
    assert request is not None
    run = submitted(monkeypatch, Slurm, request)
    for name in ("job.sh", "job.json"):
        assert stat.S_IMODE((run / name).stat().st_mode) == 0o600
    assert isinstance(request.job, Job)


@pytest.mark.parametrize("state", [State.WAITING, State.RUNNING])
def test_a_run_that_goes_on_is_not_submitted_again(
    state: State, desk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = asked("--on=slurm")
    run = submitted(monkeypatch, Slurm, request)
    monkeypatch.setattr(Slurm, "poll", lambda *_: Status(state))
    before = (run / "job.json").read_text()
    with pytest.raises(ConfigError, match=rf"is {state} as job 1; .*drivetrain stop"):
        submission.submit(request.target, request.job)
    assert (run / "job.json").read_text() == before
    # another scheduler does not make it two runs
    with pytest.raises(ConfigError, match="drivetrain stop"):
        submission.submit(Local(), request.job)
