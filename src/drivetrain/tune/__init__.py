"""Search over runs: a study is a directory, a trial in it is a run.

space.py       which config keys are searched, and over what values
settings.py    what else decides a study's result; written once
journal.py     what has happened, append-only; the study's state is a function of it
stopping.py    rules: who goes on at a rung; pure
pareto.py      several objectives: the trials that none is better than in all of them; pure
decide.py      which runs come next, and which trial is best: pure
sampling.py    values of one trial, by Optuna: a function of (seed, trial, earlier results)
population.py  of a population: who is left at a rung, and who forks from whom: pure
perturb.py     the values a fork goes on with, from its donor's: pure
pb2.py, gaussian_process.py  a fork's numbers by what members have gained so far: pure
fork.py        a fork's beginning, and the pin that keeps its donor's checkpoint until then
lineage.py     who forked from whom, as a tree of text
replay.py      a trial once more, from the root of its line: the same bits?
budget.py, meter.py  how much a study may take, and what each trial has taken
fit.py         what a trial would take, by the planner: those that cannot fit are not started
places.py      devices or machines that a trial has for itself
trial_run.py   one trial on a target: submitted, looked at, its result read
driver.py      brings the two sides together; may be killed at any moment
warm_start.py  finished trials of an earlier study
page.py, pareto_chart.py, screen.py, importance.py  a study to be looked at
scaling.py     where a parameter is best for a larger model, from studies of smaller ones: pure
optuna_trial.py  the same for one trial of Optuna's own loop: `run_trial`
ray_space.py   Ray Tune's domains as ours
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drivetrain.tune.optuna_trial import run_trial

__all__ = ["run_trial"]

STUDY_FILE = "study.json"


def is_study(address: str) -> bool:
    """Whether a directory is a study's, and not a run's: asked where no study need be read."""
    return "://" not in address and (Path(address) / STUDY_FILE).is_file()


def __getattr__(name: str) -> Any:
    if name != "run_trial":
        raise AttributeError(f"module 'drivetrain.tune' has no attribute {name!r}")
    from drivetrain.tune.optuna_trial import run_trial

    return run_trial
