"""The driver and whoever runs its jobs: one that does not answer for a while loses nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from drivetrain.core.errors import ConfigError, DrivetrainError, EnvironmentProblem, Problem
from drivetrain.launch.job import Job
from drivetrain.launch.submission import Submission
from drivetrain.launch.target import State, Status
from drivetrain.launch.targets.hosts import SshHosts
from drivetrain.launch.targets.local import Local
from drivetrain.tune import driver
from drivetrain.tune.decide import Work
from drivetrain.tune.driver import Driver
from drivetrain.tune.journal import Asked, Ended
from drivetrain.tune.places import places_for
from drivetrain.tune.settings import Settings, open_study
from drivetrain.tune.space import Choice, Space
from drivetrain.tune.trial_run import NoAnswer, Runner

RUNNING, WAITING, DONE = Status(State.RUNNING), Status(State.WAITING), Status(State.FINISHED)
LOST = Status(State.UNKNOWN, "no longer known")
JOB = Job("study", "train.py", (), (), "", "/")


@dataclasses.dataclass(frozen=True)
class Told(Runner):
    """A scheduler that answers what a test says, one answer a question."""

    submits: list[Exception | None] = dataclasses.field(default_factory=list)
    answers: list[Status | Exception] = dataclasses.field(default_factory=list)
    started: list[int] = dataclasses.field(default_factory=list)

    def status(self, asked: Asked, rung: int) -> Status | None:
        if asked.trial not in self.started:
            return None
        found = self.answers.pop(0) if self.answers else DONE
        if isinstance(found, Exception):
            raise found
        return found

    def start(self, asked: Asked, rung: int, running: Iterable[int]) -> bool:
        if self.submits and (error := self.submits.pop(0)) is not None:
            raise error
        self.started.append(asked.trial)
        return True

    def result(self, work: Work, status: Status, num_resumed: int) -> Ended | None:
        if status.state is not State.FINISHED:
            return super().result(work, status, num_resumed)
        return Ended(work.trial, work.rung, "done", 1, 0.5)

    def pause_s(self, num_running: int) -> float:
        return 0.0


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("optuna")
    for name in ("_AGAIN_S", "SETTLE_S", "_FORGOTTEN_S"):
        monkeypatch.setattr(driver, name, 0.0)


def drive(tmp_path: Path, **told: Any) -> tuple[Told, list[str]]:
    settings = Settings("train.py", (), num_trials=2, sampler="random")
    study = open_study(tmp_path / "study", settings, Space({"seed": Choice((1, 2))}))
    runner, said = Told(study, Local(), JOB, **told), list[str]()
    best = Driver(study, runner, 1, said.append).run()
    assert best is not None
    return runner, said


def test_waiting_in_a_queue_is_no_end(tmp_path: Path) -> None:
    runner, _ = drive(tmp_path, answers=[WAITING, WAITING, RUNNING])
    assert runner.started == [0, 1]


def test_one_that_cannot_be_asked_is_asked_again(tmp_path: Path) -> None:
    silence = NoAnswer("slurm does not answer (squeue: timed out)")
    runner, said = drive(tmp_path, answers=[RUNNING, silence, silence, RUNNING, silence])
    assert runner.started == [0, 1], "nothing was started twice"
    assert sum("does not answer" in line for line in said) == 2
    assert sum("the scheduler answers again" in line for line in said) == 2


def test_a_job_that_its_scheduler_has_forgotten_is_resumed(tmp_path: Path) -> None:
    runner, said = drive(tmp_path, answers=[RUNNING, LOST, RUNNING])
    assert runner.started == [0, 0, 1]
    assert "trial 0: interrupted; resuming" in said


def test_it_is_forgotten_only_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "_FORGOTTEN_S", 60.0)
    runner, _ = drive(tmp_path, answers=[LOST, LOST, RUNNING, LOST])
    assert runner.started == [0, 1]


def test_a_trial_that_could_not_be_handed_over_is_tried_again(tmp_path: Path) -> None:
    problem = Problem("--address", "no server answers", "start it", "there")
    errors = [None, DrivetrainError("sbatch: timed out"), EnvironmentProblem([problem])]
    runner, said = drive(tmp_path, submits=errors)
    assert runner.started == [0, 1]
    assert sum(line.startswith("trial 1: not submitted (") for line in said) == 2


@pytest.mark.parametrize(
    "errors",
    [[DrivetrainError("sbatch: not here")], [None, ConfigError([Problem("a", "b", "c", 1)])]],
)
def test_what_is_wrong_from_the_start_or_refused_is_said_at_once(
    tmp_path: Path, errors: list[Exception | None]
) -> None:
    with pytest.raises(DrivetrainError):
        drive(tmp_path, submits=errors)


def test_each_trial_has_machines_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("a slots=2\nb slots=2 address=10.0.0.2\nc slots=2\n")
    target, job = SshHosts(hosts=str(file)), dataclasses.replace(JOB, num_nodes=1, max_nodes=1)
    places, running = places_for(target, job, 2), list[Submission]()
    for expected in ("a slots=2\n", "b slots=2 address=10.0.0.2\n", "c slots=2\n"):
        run_dir = tmp_path / str(len(running))
        run_dir.mkdir()
        place = places.free(running)
        assert place is not None
        there, placed = places.placed(place, target, dataclasses.replace(job, run_dir=str(run_dir)))
        assert (run_dir / "hosts").read_text() == expected
        running.append(Submission(there, placed, "here:1", ""))
    assert places.free(running) is None
    del running[1]
    assert places.free(running) == ("b",)
    alone = Submission(target, job, "here:1", "")
    assert places.free([alone]) == ("b",), "it was started alone, on the first machine"
    with pytest.raises(ConfigError, match="trials of 2 each do not fit on the 3 machines"):
        places_for(target, dataclasses.replace(job, num_nodes=2, max_nodes=2), 2)


def test_flags_of_the_target_are_those_of_train(tmp_path: Path) -> None:
    from drivetrain.cli.tune import _request

    script = tmp_path / "train.py"
    script.touch()

    def asked(on: str, *words: str) -> Any:
        settings = Settings(str(script), words, num_trials=2, processes_per_trial=2)
        return _request(settings, tmp_path / "study", on)

    words = ("--partition=main", "--nodes", "2", "--time", "1:00:00", "--env=A=b", "max_steps=3")
    found = asked("slurm", *words)
    assert found.target.partition == "main"
    job = found.job
    assert (job.num_nodes, job.processes_per_node, job.time_limit_s) == (2, 2, 3600)
    assert job.script_args == ("max_steps=3",)
    assert (job.name, job.environment) == ("study", (("A", "b"),))
    assert asked("", "--env", "CartPole").job.script_args == ("--env", "CartPole")
    for flag in ("--run-dir=x", "--nproc-per-node=4", "--wait", "--dry-run", "--nnodes=1:2"):
        name = flag.partition("=")[0]
        with pytest.raises(ConfigError, match=f"{name}: cannot be used in a study"):
            asked("slurm", flag)
    with pytest.raises(ConfigError, match="--mount-path = /no/such: results are read"):
        asked("kubernetes", "--image=a:1", "--claim=runs", "--mount-path=/no/such")
