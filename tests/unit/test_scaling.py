"""Speed-ups by hand, what is refused, the waiting in place of compute, and the picture."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from drivetrain.cli.bench import TypedScaling, scaling_request_of
from drivetrain.cluster.description import Link
from drivetrain.core.errors import ConfigError
from drivetrain.scaling.predict import Exchanges, compute_seconds, predictions
from drivetrain.scaling.request import (
    AGAIN,
    BARE,
    LOSS_TOLERANCE,
    OURS,
    ArmSamples,
    ScalingRequest,
    Setting,
    SizeResult,
    lines_of,
    loss_difference,
    resolved,
    results_document,
    sizes_up_to,
)
from drivetrain.scaling.show import heading, line, plot, summary
from drivetrain.scaling.workload import Workload, loss_of

TYPED = TypedScaling("ddp,fsdp", "none", "both", "", None, None, 5, 10, 2, 64, 4, 32, None, None)
ASKED = ScalingRequest(("ddp",), emulate_compute_ms=30.0, layers=2, width=8, sequence_length=4)


def size_result(mode: str, ranks: int, seconds: dict[str, float], apart: float = 0.0) -> SizeResult:
    found = SizeResult(Setting(mode, ranks, 8))
    for arm, each in seconds.items():
        found.arms[f"ddp {arm}"] = ArmSamples("ddp", arm, [each] * 5, apart)
    return found


def test_speed_up_and_efficiency_by_hand() -> None:
    results = [
        size_result("weak", 1, {BARE: 0.1}),
        size_result("weak", 4, {BARE: 0.125, OURS: 0.2}),
        size_result("strong", 1, {BARE: 0.1}),
        size_result("strong", 4, {BARE: 0.05, OURS: 0.04}),
    ]
    found = {(each.mode, each.num_ranks, each.arm): each for each in lines_of(results)}
    # weak: four times the samples in 1.25 times the time
    assert found["weak", 4, BARE].speedup.value == pytest.approx(3.2)
    assert found["weak", 4, OURS].efficiency.value == pytest.approx(0.5)
    assert found["weak", 4, OURS].to_bare is not None
    assert found["weak", 4, OURS].to_bare.value == pytest.approx(1.6)  # type: ignore[union-attr]
    # strong: the same samples in half the time
    assert found["strong", 4, BARE].speedup.value == pytest.approx(2.0)
    assert found["strong", 4, OURS].efficiency.value == pytest.approx(0.625)


def test_losses_that_differ_are_marked_and_named() -> None:
    results = [
        size_result("weak", 1, {BARE: 0.1}),
        size_result("weak", 2, {BARE: 0.1, OURS: 0.1}, apart=2 * LOSS_TOLERANCE),
    ]
    lines = lines_of(results)
    assert "same bits" in line(lines[0])
    assert line(lines[1]).rstrip().endswith("2e-05 !")
    (said,) = summary(lines)
    assert "bare DDP on 2 (weak)" in said
    assert "drivetrain ddp on 2 (weak)" in said


@pytest.mark.parametrize(
    ("losses", "apart"),
    [([1.0, 2.0], 0.0), ([1.0, 2.2], 0.1), ([1.0], math.inf), ([1.0, math.nan], math.inf)],
)
def test_a_loss_that_is_missing_or_no_number_is_no_equal(losses: list[float], apart: float) -> None:
    assert loss_difference(losses, [1.0, 2.0]) == pytest.approx(apart)


def test_sizes_and_batches_divide() -> None:
    assert sizes_up_to(1) == (1,)
    assert sizes_up_to(6) == (1, 2, 4, 6)
    assert resolved(ASKED, 8) == ((1, 2, 4, 8), 8)
    assert resolved(replace(ASKED, sizes=(3,)), 3) == ((1, 3), 9)
    with pytest.raises(ConfigError, match="multiple of 12"):
        resolved(replace(ASKED, batch_size=8), 6)
    assert resolved(replace(ASKED, batch_size=8, modes=("weak",)), 6) == ((1, 2, 4, 6), 8)
    with pytest.raises(ConfigError, match="only 2 ranks were started"):
        resolved(replace(ASKED, sizes=(4,)), 2)


def test_every_mistake_is_said_at_once() -> None:
    typed = replace(
        TYPED,
        strategies="zero",
        beside="mpi",
        mode="week",
        sizes="1,x",
        batch_size=0,
        rounds=1,
        width=6,
        emulate_compute_ms=-1.0,
    )
    with pytest.raises(ConfigError) as caught:
        scaling_request_of(typed)
    said = str(caught.value)
    flags = ("strategies", "beside", "mode", "sizes", "batch-size", "rounds", "width")
    for flag in (*flags, "emulate-compute"):
        assert f"--{flag}" in said


def test_the_request_survives_its_way_to_the_ranks() -> None:
    asked = scaling_request_of(replace(TYPED, sizes="1,2", plot_file="x.png"))
    assert ScalingRequest.from_json(asked.to_json()) == asked


def test_waiting_takes_the_place_of_compute() -> None:
    """All of it for a whole batch, a quarter for a quarter; and the gradients are complete."""
    for setting, expected_s in ((Setting("weak", 4, 8), 0.03), (Setting("strong", 4, 8), 0.0075)):
        workload = Workload(ASKED, setting)
        model = workload.model()
        batch = next(workload.batches(0, torch.device("cpu")))
        assert len(batch[0]) == setting.rank_batch
        began_s = time.perf_counter()
        loss_of(model, batch).backward()
        assert time.perf_counter() - began_s >= expected_s
        assert all(parameter.grad is not None for parameter in model.parameters())


def test_all_ranks_together_read_what_one_process_reads() -> None:
    setting = Setting("weak", 3, 4)
    workload = Workload(ASKED, setting)
    data = workload.dataset()
    dealt = [workload.batches(rank, torch.device("cpu")) for rank in range(3)]
    for step in range(3):
        rows = torch.cat([next(each)[0] for each in dealt])
        whole = torch.stack([data[step * 12 + index][0] for index in range(12)])
        assert sorted(rows.tolist()) == sorted(whole.tolist())


def test_the_planner_adds_what_computing_does_not_hide() -> None:
    setting = Setting("weak", 4, 8)
    assert compute_seconds(setting, 0.032, 0.03) == pytest.approx(0.032)
    assert compute_seconds(Setting("strong", 4, 8), 0.032, 0.03) == pytest.approx(0.0095)
    assert compute_seconds(Setting("strong", 4, 8), 0.032, 0.0) == pytest.approx(0.008)
    slow, fast = (Exchanges(Link(rate, 0.0)) for rate in (1e4, 1e9))
    alone = {"ddp": 0.032}
    assert predictions(Workload(ASKED, setting), alone, None, is_cpu=True) == {}
    near = predictions(Workload(ASKED, setting), alone, fast, is_cpu=True)["ddp"]
    far = predictions(Workload(ASKED, setting), alone, slow, is_cpu=True)["ddp"]
    assert near == pytest.approx(0.032, rel=0.01)
    gradient_bytes = 4 * sum(p.numel() for p in Workload(ASKED, setting).model().parameters())
    assert far > 0.032 + 0.1 * 1.5 * gradient_bytes / 1e4


def test_the_heading_says_what_was_emulated_and_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    about = {"torch": "2"}
    assert any("is sleep, not compute" in text for text in heading(ASKED, about))
    results = [
        size_result(mode, ranks, {BARE: 0.1, AGAIN: 0.1, OURS: 0.11})
        for mode in ("weak", "strong")
        for ranks in (1, 2)
    ]
    results[1].predicted_s = {"ddp": 0.1}
    plot(lines_of(results), ASKED, about, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000
    document = results_document(ASKED, results, about)
    assert document["samples"][0]["arms"]["ddp bare"]["seconds"] == [0.1] * 5
