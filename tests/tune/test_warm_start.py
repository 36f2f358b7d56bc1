"""A study that knows another's finished trials from the start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from drivetrain.core.errors import ConfigError
from drivetrain.tune import sampling, warm_start
from drivetrain.tune.journal import Asked, Ended, Journal, State
from drivetrain.tune.settings import Settings, Study, open_study
from drivetrain.tune.space import Choice, Float, Int, Parameter, Space

pytest.importorskip("optuna")
RATE, KIND, STEPS = "optimization.learning_rate", "optimization.optimizer", "max_steps"


def earlier(path: Path, sign: float = 1.0, num: int = 16) -> Path:
    space = Space({RATE: Float(1e-4, 1e-1, log=True), KIND: Choice(("adamw", "sgd"))})
    open_study(path, Settings("train.py", (), num_trials=20, rungs=(4,)), space)
    journal = Journal(path)
    for trial in range(num):
        journal.write(Asked(trial, {RATE: 1e-4 * 1.5**trial, KIND: ("adamw", "sgd")[trial % 2]}))
        journal.write(Ended(trial, 0, "done", 4, 9.0))
        if trial < 14:  # the others have not finished
            journal.write(Ended(trial, 1, "done", 8, sign * abs(trial - 3) + 20))
    return path


def started(path: Path, before: Path, **changes: Any) -> Study:
    parameters: dict[str, Parameter] = {
        RATE: Float(1e-4, 1e-2),
        KIND: Choice(("adamw", "muon")),
        STEPS: Int(10, 20, step=5),
    }
    space = Space(parameters)
    settings = Settings("train.py", (), **{"num_trials": 8, "warm_start": str(before), **changes})
    found = warm_start.prepare(path, settings, space)
    study = open_study(path, settings, space)
    warm_start.keep(study, found)
    return study


def test_finished_trials_are_told_as_far_as_the_new_space_has_their_values(tmp_path: Path) -> None:
    study = started(tmp_path / "new", earlier(tmp_path / "old"))
    told = warm_start.told(study)
    assert len(told) == 13, "14 have finished; one has no value that the new space could draw"
    assert told[0] == ({RATE: 1e-4, KIND: "adamw"}, 23.0)
    assert told[1][0] == {RATE: 1e-4 * 1.5}, "sgd is no choice any more"
    assert told[-1][0] == {KIND: "adamw"}, "the rate is out of the range"


def test_the_first_values_go_by_them_and_not_by_what_comes_later(tmp_path: Path) -> None:
    asked = []
    for name, sign in (("a", 1.0), ("b", -1.0)):
        before = earlier(tmp_path / f"old-{name}", sign)
        study = started(tmp_path / name, before)
        asked.append(sampling.ask(study, State()).values)
        Journal(before).write(Ended(14, 1, "done", 8, 0.0))
        assert sampling.ask(started(tmp_path / name, before), State()).values == asked[-1]
    assert asked[0] != asked[1]


def test_what_cannot_be_told_is_refused(tmp_path: Path) -> None:
    before = earlier(tmp_path / "old")
    for changes, said in (
        ({"metric": "accuracy"}, "searched for min loss"),
        ({"sampler": "random"}, "uses no results"),
        ({"warm_start": str(tmp_path / "none")}, "contains no study"),
        ({"warm_start": str(earlier(tmp_path / "empty", num=0))}, "no finished trial"),
    ):
        with pytest.raises(ConfigError, match=said):
            started(tmp_path / "new", before, **changes)
        assert not (tmp_path / "new").exists()
