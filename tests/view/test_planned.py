from __future__ import annotations

from drivetrain.view.summary import planned_and_measured
from tests.view.runs import run_view

PLAN = {
    "question": {"global_batch_size": 64},
    "plans": [{"step_s": {"compute": 0.09, "total": 0.1}, "samples_per_s": 640.0}],
}


def test_the_best_plans_step_stands_beside_the_measured_one() -> None:
    step, samples = planned_and_measured(run_view(), PLAN).plan
    assert step == ("step", 0.1, 0.125, "s")
    assert samples == ("samples", 640.0, 512.0, "samples/s")


def test_a_run_without_a_plan_has_no_rows() -> None:
    assert not planned_and_measured(run_view(), {}).plan
