"""The count of winners that change: by hand, and one seed of ours on one worker and on four."""

from __future__ import annotations

import pytest

from benchmarks.tune_winners import ARMS, changed, table

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


@pytest.mark.slow
@pytest.mark.long
def test_ours_does_not_change() -> None:
    arm = ARMS["drivetrain, deterministic"]
    assert arm(0, 1) == arm(0, 4) != arm(1, 4)
