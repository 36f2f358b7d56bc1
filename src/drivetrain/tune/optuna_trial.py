"""run_trial: a trial of Optuna's own loop as a Drivetrain run.

    study.optimize(lambda trial: run_trial(trial, "train.py", "space.yaml", rungs=(24, 48)), 20)

Values are drawn once, here, before any rank starts, so all ranks have the same. The pruner is also
asked here.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from drivetrain.core.errors import ConfigError, NonFiniteLoss, Problem, WorkerFailure
from drivetrain.core.requirements import require
from drivetrain.launch import submission
from drivetrain.launch.target import target_type
from drivetrain.tune.decide import Work
from drivetrain.tune.journal import Asked, Ended
from drivetrain.tune.sampling import suggested
from drivetrain.tune.settings import Settings, Study, checked_settings, problems
from drivetrain.tune.space import Space, read_space
from drivetrain.tune.trial_run import MOST_RESUMES, SETTLE_S, Runner, local_job


def run_trial(
    trial: Any,
    script: str | Path,
    space: Space | str | Path,
    *,
    script_args: Sequence[str] = (),
    study: str | Path | None = None,
    **settings: Any,
) -> float:
    """Train `script` with the trial's values; return the metric at its last evaluation.

    At each of `rungs` the run is saved, its value reported, and the trial's pruner asked: the run
    resumes from there bit for bit, or is pruned. A trial that fails raises, so that Optuna counts
    it as failed (`optimize(catch=(NonFiniteLoss, WorkerFailure))` continues with the next).
    `study` is the directory of the runs; `settings` are a study's: rungs, metric,
    processes_per_trial, max_restarts.
    """
    optuna = require("optuna", extra="tune")
    given = space if isinstance(space, Space) else read_space(space)
    made = _settings(str(script), tuple(script_args), trial.number + 1, settings)
    values = suggested(given, trial)
    if not given.allows(values):
        raise optuna.TrialPruned("the values violate a constraint of the space")
    path = Path(study or f"studies/{trial.study.study_name}")
    runs = Study(path, made, given)
    runner = Runner(runs, target_type("local")(), local_job(runs))
    asked, value = Asked(trial.number, values), 0.0
    _refuse_anothers(runner, asked)
    for rung in range(made.num_rungs):
        end = _trained(runner, Work(trial.number, rung), asked)
        value = _value_of(end)
        trial.report(value, end.step)
        if rung < made.num_rungs - 1 and trial.should_prune():
            raise optuna.TrialPruned(f"at step {end.step}")
    return value


def _settings(script: str, words: tuple[str, ...], num: int, said: Mapping[str, Any]) -> Settings:
    known = ("rungs", "metric", "processes_per_trial", "max_restarts")
    if strangers := [name for name in said if name not in known]:
        rule = "is decided by Optuna's study, or unknown"
        raise ConfigError([Problem(strangers[0], rule, ", ".join(known), has_value=False)])
    own = {"script": script, "script_args": words, "num_trials": num}
    settings = checked_settings({**said, **own})
    if found := problems(settings):
        raise ConfigError(found)
    return settings


def _refuse_anothers(runner: Runner, asked: Asked) -> None:
    """Raise if the run has other values: every Optuna study numbers its trials from 0."""
    folder = runner.study.run_dir(asked.trial)
    made = submission.find(folder)
    rungs = range(runner.study.settings.num_rungs)
    if made is not None and made.job.script_args not in {
        runner.job(asked, rung).script_args for rung in rungs
    }:
        rule = f"contains a trial {asked.trial} with different values"
        raise ConfigError([Problem("study", rule, "use another directory", str(folder))])


def _trained(runner: Runner, work: Work, asked: Asked) -> Ended:
    """Train up to the rung; resume if interrupted."""
    for resumed in range(MOST_RESUMES):
        status = runner.status(asked, work.rung)
        if status is None or resumed:
            runner.start(asked, work.rung, ())
            status = runner.status(asked, work.rung)
        while status is not None and not status.state.is_over:
            time.sleep(runner.pause_s(1))
            status = runner.status(asked, work.rung)
        end = None if status is None else runner.result(work, status, resumed)
        if end is not None:
            return end
        time.sleep(SETTLE_S)
        while runner.is_leaving(work.trial):
            time.sleep(runner.pause_s(1))
    raise WorkerFailure(f"trial {work.trial} was interrupted {MOST_RESUMES} times")


def _value_of(end: Ended) -> float:
    if end.outcome == "not_finite":
        raise NonFiniteLoss(f"trial {end.trial}: {end.reason}")
    if end.value is None:
        raise WorkerFailure(f"trial {end.trial}: {end.reason}")
    return end.value
