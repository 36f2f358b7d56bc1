"""Search over runs: a study is a directory, a trial in it is a run.

space.py       which config keys are searched, and over what values
settings.py    everything else that decides a study's result; written once
journal.py     what has happened, append-only; the study's state is a function of it
stopping.py    rules: which trials continue at a rung; pure
pareto.py      several objectives: the trials that no other dominates; pure
decide.py      which runs come next, and which trial is best; pure
sampling.py    values of one trial, by Optuna: a function of (seed, trial, earlier results)
population.py  of a population: which members end at a rung, and which fork from which; pure
perturb.py     the values of a fork, from its donor's; pure
pb2.py, gaussian_process.py  a fork's numbers, from the members' gains so far; pure
fork.py        the start of a fork, and the pin that keeps its donor's checkpoint until then
lineage.py     the forks of a population as a text tree
replay.py      trains a trial again from the root of its lineage: the same bits?
budget.py, meter.py  how much a study may spend, and what each trial has spent
fit.py         the planner's prediction for a trial: trials that cannot fit are not started
places.py      devices or machines reserved for a trial
trial_run.py   one trial on a target: submit it, look at it, read its result
driver.py      carries out what decide.py says; may be killed at any moment
warm_start.py  finished trials of an earlier study
page.py, pareto_chart.py, screen.py, importance.py  pages and screens of a study
scaling.py     predicts the best value for a larger model from studies of smaller ones; pure
optuna_trial.py  runs one trial of Optuna's own loop: `run_trial`
ray_space.py   converts Ray Tune's domains
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drivetrain.tune.optuna_trial import run_trial

__all__ = ["run_trial"]

STUDY_FILE = "study.json"


def is_study(address: str) -> bool:
    """Whether a directory is a study's and not a run's, without reading the study."""
    return "://" not in address and (Path(address) / STUDY_FILE).is_file()


def __getattr__(name: str) -> Any:
    if name != "run_trial":
        raise AttributeError(f"module 'drivetrain.tune' has no attribute {name!r}")
    from drivetrain.tune.optuna_trial import run_trial

    return run_trial
