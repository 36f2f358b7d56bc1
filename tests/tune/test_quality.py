"""The comparison of searches: its trials are exact, and every arm keeps to the same budget."""

from __future__ import annotations

import pytest

from benchmarks.tune.digits import EVERY, LAST, RANGES, Training
from benchmarks.tune.quality import OURS, PERTURBED, Result, ours, table

pytest.importorskip("optuna")
pytest.importorskip("sklearn")
VALUES = {key: given.low for key, given in RANGES.items()} | {"optimization.learning_rate": 0.1}


def test_a_trial_that_waits_or_is_forked_goes_on_as_if_nothing_had_been() -> None:
    whole, paused = Training(VALUES, 3), Training(VALUES, 3)
    first = paused.train_to(EVERY)
    other = Training({**VALUES, "optimization.learning_rate": 1e-3}, 4)
    other.seed = 3
    other.load(paused.state(), VALUES)
    end = whole.train_to(2 * EVERY)
    assert end == other.train_to(2 * EVERY)
    assert end.val < first.val
    assert end != Training(VALUES, 4).train_to(2 * EVERY), "the seed counts"


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("arm", ["drivetrain, TPE, all to the end", "drivetrain, halving, pause"])
def test_ours_trains_no_more_steps_than_the_budget_has(arm: str) -> None:
    most = 4 * LAST
    found = ours(arm, 0, most, **OURS[arm])
    assert most - 2 * LAST < found.steps <= most
    assert found.trials >= (9 if "halving" in arm else 4)


@pytest.mark.parametrize("name", ["drivetrain, population", "drivetrain, population, pb2"])
def test_a_population_spends_all_of_it_and_forks_go_on_from_their_donors(name: str) -> None:
    arm = {**OURS[name], "population": 4, "generation": 4, "num_trials": 4}
    found = ours("population", 0, 4 * LAST, **arm)
    assert found.steps == 4 * LAST, "forks train what is left, not from the start"
    assert found.trials == 4 + LAST // PERTURBED - 1, "one of four is replaced at every rung"


def test_the_table_has_the_median_and_the_ends() -> None:
    def rows(arm: str) -> list[Result]:
        return [
            Result(arm, seed, val, 0.5, 108 * LAST // 2, 9, 1.0)
            for seed, val in enumerate((0.3, 0.1, 0.2))
        ]

    saved = [
        each
        for arm in (
            "all to the end",
            "halving, rungs 27 and 81, generation 9",
            "halving, rungs 9, 27 and 81, generation 27",
        )
        for each in rows(arm)
    ]
    text = table([*rows("ray tune, ASHA"), *saved], "here")
    ends = "0.1000 to 0.3000"
    assert f"| ray tune, ASHA | 3 | 0.2000 | {ends} | {ends} | 0.5000 | 9 | 13,122 |" in text
    assert text.count("| 1/2.0 |") == 3
