"""Studies of real runs: killed, adopted, paused and promoted, with one result."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.core import locks
from drivetrain.core.errors import ConfigError
from drivetrain.launch.guardian import LOCK
from drivetrain.launch.target import State as JobState
from drivetrain.launch.target import Status
from drivetrain.launch.targets.local import Local
from drivetrain.tune import decide, trial_run
from drivetrain.tune.decide import Work
from drivetrain.tune.journal import Asked, Ended, Journal, read_journal
from drivetrain.tune.settings import Settings, Study, load_study, open_study
from drivetrain.tune.space import Choice, Space
from drivetrain.tune.trial_run import Runner, local_job
from tests.support.evaluated import write_evaluations

ROOT = Path(__file__).parents[2]
SCRIPT = str(ROOT / "tests/scripts/tuned.py")
SPACE = """
parameters:
  optimization.learning_rate: [0.3, 0.03, 0.003, 1e30]
  seed: [1, 2, 3]
"""


def command(study: Path, *flags: str, space: str = SPACE) -> list[str]:
    file = study.parent / "space.yaml"
    file.write_text(space)
    words = ["tune", SCRIPT, "--space", str(file), "--study", str(study), *flags]
    return [sys.executable, "-m", "drivetrain", *words]


def tune(study: Path, *flags: str, space: str = SPACE) -> subprocess.CompletedProcess[str]:
    words = command(study, *flags, space=space)
    return subprocess.run(words, capture_output=True, text=True, timeout=400, check=False)


def winner_of(path: Path) -> tuple[Any, str]:
    study = load_study(path)
    best = decide.winner(study.settings, read_journal(path))
    assert best is not None
    weights = study.run_dir(best.trial) / "checkpoints/weights.pt"
    tensors = torch.load(weights, weights_only=True)
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(tensors[name].numpy().tobytes())
    return best, digest.hexdigest()


def facts_of(path: Path) -> tuple[Any, Any]:
    state = read_journal(path)
    return state.asked, sorted(
        (e.trial, e.rung, e.outcome, e.step, e.value) for e in state.ended.values()
    )


def wait_until(what: Any, limit_s: float = 120.0) -> None:
    deadline_s = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def lock_holder(path: Path) -> int:
    return int(path.read_text().split()[1])


@pytest.mark.slow
def test_a_trial_that_outlives_its_driver_is_adopted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("optuna")
    monkeypatch.setenv("TUNED_SLEEP_S", "0.2")
    study = tmp_path / "study"
    flags = ("--trials", "1", "--seed", "5")
    words = command(study, *flags)
    driver = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_until((study / "trials/00000/job.json").exists)
    driver.kill()
    driver.wait()
    second = subprocess.Popen(command(study, *flags), stdout=subprocess.PIPE, text=True)
    wait_until(lambda: (study / "driver.lock").read_text().endswith(f" {second.pid}"))
    third = tune(study, *flags)
    assert third.returncode == 2
    assert f"is being driven by process {second.pid}" in third.stderr
    said, _ = second.communicate(timeout=200)
    assert "trial 0: still running; adopted" in said
    assert (second.returncode, len(facts_of(study)[1])) == (0, 1)
    assert len(list((study / "trials/00000/attempts").iterdir())) == 1, "it was not started again"


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_same_winner_on_one_worker_and_on_two_with_kills(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("optuna")
    flags = (
        "--trials",
        "3",
        "--generation",
        "3",
        "--rungs",
        "4",
        "--sampler",
        "random",
        "--seed",
        "5",
    )
    calm, rough = tmp_path / "calm", tmp_path / "rough"
    done = tune(calm, *flags)
    assert done.returncode == 0, done.stderr

    # a trial is killed while it trains, and while it starts; then the driver, and trials run on
    monkeypatch.setenv("TUNED_SLEEP_S", "0.3")
    words = command(rough, *flags, "--parallel-trials", "2")
    output = tmp_path / "said.txt"
    with output.open("w") as file:
        driver = subprocess.Popen(words, stdout=file, stderr=file)
    first, second = rough / "trials/00000", rough / "trials/00001"
    wait_until((second / "job.json").exists)
    os.kill(lock_holder(second / "conductor.lock"), signal.SIGKILL)
    wait_until(lambda: (first / "checkpoints").exists() and any(first.glob("checkpoints/step-*")))
    os.kill(lock_holder(first / "conductor.lock"), signal.SIGKILL)
    wait_until(lambda: output.read_text().count("interrupted; resuming") == 2)
    driver.kill()
    driver.wait()
    done = tune(rough, *flags, "--parallel-trials", "2")
    assert done.returncode == 0, done.stderr

    assert facts_of(calm) == facts_of(rough)
    assert winner_of(calm) == winner_of(rough)
    asked, ended = facts_of(calm)
    assert {outcome for _, _, outcome, _, _ in ended} == {"done", "not_finite"}
    assert [(rung, step) for _, rung, _, step, _ in ended if rung] == [(1, 12)]
    best, weights = winner_of(calm)

    # the winner alone, never paused: the same bits
    words = [f"{key}={value}" for key, value in asked[best.trial].values.items()]
    train = [sys.executable, "-m", "drivetrain", "train", "--run-dir", str(tmp_path / "alone")]
    subprocess.run([*train, SCRIPT, *words], check=True, capture_output=True, timeout=200)
    alone = torch.load(tmp_path / "alone/checkpoints/weights.pt", weights_only=True)
    digest = hashlib.sha256()
    for name in sorted(alone):
        digest.update(alone[name].numpy().tobytes())
    assert digest.hexdigest() == weights


OWN_OPTIMIZER = """
import torch
from torch import nn
from drivetrain import Task, Trainer, load_config

config = load_config(defaults={"global_batch_size": 8, "max_steps": 2})
data = torch.utils.data.TensorDataset(torch.randn(32, 4))
task = Task(
    lambda: nn.Linear(4, 1),
    lambda model, batch: model(batch[0]).mean(),
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05),
)
Trainer(task, config).fit(data, data)
"""


@pytest.mark.slow
def test_trials_that_are_refused_say_why(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    script, space = tmp_path / "own.py", tmp_path / "space.yaml"
    script.write_text(OWN_OPTIMIZER)
    space.write_text("parameters: {optimization.learning_rate: [0.1]}")
    words = ["tune", str(script), "--space", str(space), "--study", str(tmp_path / "study")]
    done = subprocess.run(
        [sys.executable, "-m", "drivetrain", *words, "--trials", "1"],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    said = "optimization.learning_rate = 0.1: set on the command line, but the script has its own"
    assert f"trial 0: failed: {said}" in done.stdout
    assert f"all of the first 1 trials failed: {said}" in done.stderr


def runner(tmp_path: Path, **changes: Any) -> Runner:
    space = Space({"seed": Choice((1, 2))})
    settings = Settings(SCRIPT, ("a.b=c",), num_trials=2, **changes)
    study: Study = open_study(tmp_path / "study", settings, space)
    return Runner(study, Local(), local_job(study))


def test_a_rung_is_a_stop_and_the_last_is_the_runs_own_end(tmp_path: Path) -> None:
    made = runner(tmp_path, rungs=(4, 8), processes_per_trial=2)
    words = [made.job(Asked(1, {"seed": 2}), rung).script_args for rung in range(3)]
    assert words[0] == ("a.b=c", "seed=2", "stop_at_step=4")
    assert words[1] == ("a.b=c", "seed=2", "stop_at_step=8")
    assert words[2] == ("a.b=c", "seed=2")
    assert made.job(Asked(1, {"seed": 2}), 0).processes_per_node == 2


@pytest.mark.parametrize(
    ("state", "code", "outcome"),
    [
        (JobState.FAILED, 6, "not_finite"),
        (JobState.FAILED, 2, "failed"),
        (JobState.FAILED, 1, "failed"),
        (JobState.FAILED, 137, None),
        (JobState.FAILED, -9, None),
        (JobState.FAILED, None, None),
        (JobState.STOPPED, 75, None),
        (JobState.FAILED, 75, None),
        (JobState.FAILED, 0, None),
        (JobState.UNKNOWN, None, None),
    ],
)
def test_what_becomes_of_a_job_that_did_not_finish(
    tmp_path: Path, state: JobState, code: int | None, outcome: str | None
) -> None:
    made = runner(tmp_path)
    end = made.result(Work(0, 0), Status(state, "words", exit_code=code), 0)
    assert (end and end.outcome) == outcome
    assert end is None or end.reason == "words"


def test_a_job_that_found_its_run_taken_says_nothing_of_the_trial(tmp_path: Path) -> None:
    made, refused = runner(tmp_path), Status(JobState.FAILED, "taken", exit_code=2)
    made.study.run_dir(0).mkdir(parents=True)
    lock = locks.hold(made.study.run_dir(0) / LOCK)
    assert lock is not None
    with lock:
        assert made.result(Work(0, 0), refused, 0) is None
    end = made.result(Work(0, 0), refused, 0)
    assert end is not None
    assert end.outcome == "failed"


def test_a_trial_whose_supervisor_is_killed_again_and_again_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial_run, "_last_line", lambda _: "step 50/100  loss 0.3")
    made = runner(tmp_path, max_restarts=2)
    status = Status(JobState.FAILED, "exit code 137", exit_code=137)
    ends = [made.result(Work(0, 0), status, resumed) for resumed in range(3)]
    assert ends[:2] == [None, None]
    assert ends[2] is not None
    assert (ends[2].outcome, ends[2].reason) == ("failed", "exit code 137")


def test_the_value_is_the_last_evaluations(tmp_path: Path) -> None:
    made, finished = runner(tmp_path), Status(JobState.FINISHED, exit_code=0)
    write_evaluations(made.study.run_dir(0), [(4, 0.5), (8, 0.1), (4, 0.7)])  # the last: done again
    end = made.result(Work(0, 0), finished, 0)
    assert end is not None
    assert (end.outcome, end.step, end.value) == ("done", 8, 0.1)
    straight = runner(tmp_path / "a", promote="stop", generation=1, rungs=(4, 6, 9))
    write_evaluations(straight.study.run_dir(0), [(4, 0.5), (8, 0.1)])
    ends = [straight.result(Work(0, rung), finished, 0) for rung in range(4)]
    found = [(end.step, end.value) for end in ends if end is not None]
    assert found == [(4, 0.5), (8, 0.1), (8, 0.1), (8, 0.1)], "a rung has its own evaluation"
    other = runner(tmp_path / "b", metric="accuracy")
    write_evaluations(other.study.run_dir(0), [(4, 0.5)])
    with pytest.raises(ConfigError, match="no evaluation of trial 0 has val/accuracy; found: val/"):
        other.result(Work(0, 0), finished, 0)


def test_a_metric_may_be_corrected_until_a_trial_has_a_value(tmp_path: Path) -> None:
    path = runner(tmp_path, metric="los").study.path
    made = runner(tmp_path, metric="loss").study
    assert load_study(path).settings.metric == "loss"
    Journal(made.path).write(Asked(0, {"seed": 1}))
    Journal(made.path).write(Ended(0, 0, "done", 8, 0.1))
    with pytest.raises(ConfigError, match="was 'loss' when the study began"):
        runner(tmp_path, metric="accuracy")


def test_a_rung_after_the_end_of_the_runs_is_refused(tmp_path: Path) -> None:
    made = runner(tmp_path, rungs=(4, 20), generation=3)
    write_evaluations(made.study.run_dir(0), [(4, 0.5), (12, 0.4)])
    finished = Status(JobState.FINISHED, exit_code=0)
    assert made.result(Work(0, 0), finished, 0) is not None
    assert made.result(Work(0, 2), finished, 0) is not None
    with pytest.raises(ConfigError, match="trial 0 ends after step 12, before step 20"):
        made.result(Work(0, 1), finished, 0)


def test_wrong_words_are_refused_before_anything_starts(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    from drivetrain.cli.tune import run, settings_from

    values = {"script": SCRIPT, "script_args": (), "num_trials": 2, "rungs": "4,x"}
    with pytest.raises(ConfigError, match="--rungs = 4,x: not steps"):
        settings_from(values)
    with pytest.raises(ConfigError, match=r"--sampler = cma: input should be 'tpe'"):
        settings_from({**values, "rungs": "", "sampler": "cma"})
    space = tmp_path / "space.yaml"
    space.write_text("parameters: {optimization.lr: [0.1]}")
    good = settings_from({**values, "rungs": ""})
    study = str(tmp_path / "study")
    with pytest.raises(ConfigError, match="optimization.lr"):
        run(good, str(space), study, 1, "local")
    with pytest.raises(ConfigError, match="--on = slrm: no such target; did you mean slurm"):
        run(good, str(space), study, 1, "slrm")
    assert not Path(study).exists()


def test_without_optuna_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from drivetrain.cli.tune import run

    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ConfigError, match=r"pip install .*\[tune\]'"):
        run(Settings(SCRIPT, (), num_trials=1), "space.yaml", str(tmp_path / "study"), 1, "local")
    assert not (tmp_path / "study").exists()
