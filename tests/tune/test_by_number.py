"""Samplers that go by a trial's number: every combination once; even, and the same each time."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from drivetrain.core.errors import ConfigError
from drivetrain.tune.by_number import Points, grid, qmc
from drivetrain.tune.settings import Settings, open_study
from drivetrain.tune.space import Choice, Float, Int, Space

RATE, STEPS, DECAY = (
    "optimization.learning_rate",
    "optimization.warmup_steps",
    "optimization.weight_decay",
)
WHICH, MOMENTUM = "optimization.optimizer", "optimization.momentum"


def test_a_grid_has_every_combination_once() -> None:
    space = Space(
        {
            WHICH: Choice(("adamw", "sgd")),
            MOMENTUM: Choice((0.0, 0.9), when={WHICH: ("sgd",)}),
            DECAY: Float(0.0, 0.3, step=0.1),
            STEPS: Int(0, 25, step=10),
        },
        (f"{STEPS} != 10",),
    )
    found = grid(space)
    assert len(found) == 3 * 4 * 2  # adamw, sgd and sgd; decays; steps but one
    assert {each.get(MOMENTUM) for each in found if each[WHICH] == "adamw"} == {None}
    assert {each[DECAY] for each in found} == {0.0, 0.1, 0.2, 0.3}
    assert {each[STEPS] for each in found} == {0, 20}


@pytest.mark.parametrize("parameter", [Float(0.0, 1.0), Float(0.1, 1.0, log=True)])
def test_a_range_without_a_step_makes_no_grid(parameter: Float) -> None:
    with pytest.raises(ConfigError, match="a range without a step has none"):
        grid(Space({DECAY: parameter}))


def test_a_grid_that_nobody_could_train_is_refused() -> None:
    with pytest.raises(ConfigError, match="1,000,000 combinations"):
        grid(Space({STEPS: Int(1, 1_000_000)}))


def test_a_study_of_a_grid_is_as_large_as_the_grid(tmp_path: Path) -> None:
    space, made = Space({STEPS: Int(0, 3)}), {"sampler": "grid", "num_trials": 3}
    with pytest.raises(ConfigError, match="the grid has 4 combinations"):
        open_study(tmp_path, Settings("train.py", (), **made), space)  # type: ignore[arg-type]


def test_sobol_points_are_even_and_follow_from_the_seed() -> None:
    pytest.importorskip("scipy")
    space = Space(
        {RATE: Float(1e-4, 1e-1, log=True), STEPS: Int(0, 7), WHICH: Choice(("adamw", "sgd"))}
    )
    points = list(islice(qmc(space, 3), 64))
    assert points == list(islice(qmc(space, 3), 64)) != list(islice(qmc(space, 4), 64))
    assert sum(each[WHICH] == "sgd" for each in points) == 32
    assert all(sum(each[STEPS] == step for each in points) == 8 for step in range(8))
    rates: list[Any] = sorted(each[RATE] for each in points)
    assert 1e-4 <= rates[0] < 1.2e-4
    assert 30 <= sum(rate < 10**-2.5 for rate in rates) <= 34
    by_trial = Points(space, "qmc", 3)
    assert [by_trial[5], by_trial[0]] == [points[5], points[0]]


def test_constraints_that_leave_nothing_are_said() -> None:
    pytest.importorskip("scipy")
    with pytest.raises(ConfigError, match="points in a row violate them"):
        next(qmc(Space({STEPS: Int(0, 7)}, (f"{STEPS} > 9",)), 0))
