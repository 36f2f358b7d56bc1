"""Optuna's own loop over runs: the second trial is pruned, the third's loss is no number."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import optuna
from optuna.storages.journal import JournalFileBackend

from drivetrain import NonFiniteLoss
from drivetrain.tune import run_trial
from drivetrain.tune.space import Choice, Space

RATE = "optimization.learning_rate"
RATES = (0.03, 0.003, 1e30)


class Second(optuna.pruners.BasePruner):
    def prune(self, study: Any, trial: Any) -> bool:
        return bool(trial.params[RATE] == RATES[1])


def main(folder: Path) -> None:
    storage = optuna.storages.JournalStorage(JournalFileBackend(str(folder / "own.journal")))
    study = optuna.create_study(study_name="own", storage=storage, pruner=Second())
    for rate in RATES:
        study.enqueue_trial({RATE: rate})
    script, space = Path(__file__).with_name("tuned.py"), Space({RATE: Choice(RATES)})
    study.optimize(
        lambda trial: run_trial(trial, script, space, rungs=(4,), study=folder / "own"),
        n_trials=3,
        catch=(NonFiniteLoss,),
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
