"""The figures of `bench plan-time`, and a rehearsal beside the planner's prediction."""

from __future__ import annotations

import pytest

from benchmarks.plan.time_report import kendall
from drivetrain.cluster.description import Link
from drivetrain.cluster.exchange import PLANNED, fit
from drivetrain.parallel.layout import Layout
from drivetrain.plan.cost.timing import Ring
from drivetrain.rehearse.beside_plan import PEAK, Prediction, compare
from drivetrain.rehearse.calls import RehearsedCall
from drivetrain.rehearse.findings import RankMemory, RankReport


def test_kendall_is_1_in_the_same_order_and_minus_1_in_the_other() -> None:
    same = [(1.0, 10.0), (2.0, 20.0), (3.0, 25.0), (4.0, 70.0)]
    assert kendall(same) == 1.0
    assert kendall([(a, -b) for a, b in same]) == -1.0
    assert kendall([(1, 1), (2, 3), (3, 2)]) == pytest.approx(1 / 3)


@pytest.mark.parametrize("kind", PLANNED)
@pytest.mark.parametrize("ranks", [2, 4, 64])
def test_a_measured_collective_is_predicted_as_it_was_measured(kind: str, ranks: int) -> None:
    measured = {size: 1e-3 + size * 2e-9 for size in (1 << 12, 1 << 16, 1 << 20, 1 << 23)}
    fitted = fit(kind, measured, ranks)
    link = Link(1.0, 0.0, {kind: (fitted.bytes_per_s, fitted.latency_s)})
    for size, seconds in measured.items():
        assert Ring(ranks, link).seconds(kind, size) == pytest.approx(seconds, rel=0.01)


def test_a_rehearsal_is_held_against_the_prediction_of_its_stage() -> None:
    layout = Layout(pp=2, dp_shard=2)
    gather = RehearsedCall("all_gather", 4096, "float32", (0, 1))
    small = RehearsedCall("all_reduce", 8, "float32", (0, 1, 2, 3))
    reports = [
        RankReport(0, "first stage", in_step=(gather, small), memory=RankMemory(peak=1000)),
        RankReport(2, "last stage", memory=RankMemory(peak=500)),
    ]
    along = ("all_gather", "dp_shard")
    prediction = Prediction((990.0, 500.0), ({along: 4096.0}, {along: 2048.0}))
    found = {(one.rank, one.what): one for one in compare(prediction, reports, layout)}
    assert found[0, PEAK].error == pytest.approx(-0.01)
    assert found[0, "all_gather dp_shard"].error == 0
    assert found[2, PEAK].error == 0
    assert found[2, "all_gather dp_shard"].error is None  # nothing was counted
    assert len(found) == 4
