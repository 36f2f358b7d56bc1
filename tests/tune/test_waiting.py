"""The simulation of waiting: what must be nothing is, and what must be more is."""

from __future__ import annotations

import pytest

from benchmarks.tune.waiting import LAST_STEP, simulate
from drivetrain.tune.settings import Settings


def test_equal_trials_on_workers_that_divide_a_generation_wait_for_nobody() -> None:
    settings = Settings("train.py", (), 24, generation=8)
    course = simulate(settings, 4, 0.0, seed=0)
    assert course.waited == pytest.approx(0.0, abs=1e-12)
    assert course.steps == 24 * LAST_STEP
    assert course.seconds == 24 * LAST_STEP / 4
    five = simulate(settings, 5, 0.0, seed=0)
    assert five.waited == pytest.approx(1 - 8 / 10), "two turns of five for eight trials"


def test_an_eager_study_waits_less_and_trains_as_much_where_nobody_is_judged() -> None:
    waits = Settings("train.py", (), 24, generation=8)
    eager = Settings("train.py", (), 24, schedule="eager")
    for seed in range(3):
        slow, quick = (simulate(each, 4, 1.0, seed) for each in (waits, eager))
        assert quick.waited < slow.waited
        assert quick.steps == slow.steps
