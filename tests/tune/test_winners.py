"""The count of winners that change: by hand, and one seed of ours on one worker and on four."""

from __future__ import annotations

import pytest

from benchmarks.tune.winners import ARMS, STEPS, changed, loss_of, seconds_of, seconds_to, table

pytest.importorskip("optuna")


def test_winners_are_held_against_the_first_round_on_one_worker() -> None:
    rows = [(0, 1, 0, 0.1), (0, 1, 1, 0.1), (0, 2, 0, 0.1), (1, 1, 0, 0.2), (1, 1, 1, 0.3)]
    rows.append((1, 2, 0, 0.3))
    found = [
        {"arm": "ours", "seed": seed, "workers": num, "round": turn, "winner": [value]}
        for seed, num, turn, value in rows
    ]
    assert changed(found, "ours", 1) == (1, 2)
    assert changed(found, "ours", 2) == (1, 2)
    assert "| ours | 1 of 2 | 1 of 2 |" in table(found)


def test_trials_that_may_be_stopped_come_to_the_same_end_in_the_same_time() -> None:
    keys = ("optimization.learning_rate", "optimization.weight_decay", "optimization.momentum")
    values = dict(zip(keys, (0.03, 0.70005, 0.3), strict=True))
    assert sum(seconds_to(values, step) for step in STEPS) == pytest.approx(seconds_of(values))
    assert loss_of(values) == loss_of(values, STEPS[-1]) < loss_of(values, 3) < loss_of(values, 1)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    "name", ["drivetrain, deterministic", "drivetrain, halving, deterministic"]
)
def test_ours_does_not_change(name: str) -> None:
    arm = ARMS[name]
    assert arm(0, 1) == arm(0, 4) != arm(1, 4)
