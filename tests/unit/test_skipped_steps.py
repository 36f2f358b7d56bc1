"""fp16 skips steps whose gradients are not finite: counted, said, and not for ever."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from drivetrain import Task, Trainer
from drivetrain.core.errors import NonFiniteLoss
from drivetrain.record.reading import open_run
from drivetrain.train.history import History, StepMetrics
from drivetrain.train.keep_loop import prepare
from drivetrain.train.watch.logged_steps import LoggedSteps


def data() -> TensorDataset:
    x = torch.randn(48, 4, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, (x.sum(1) > 0).long())


class Loss:
    """The mean, times a factor for some of the calls."""

    def __init__(self, factor: float, first: int, last: int) -> None:
        self.factor, self.first, self.last, self.calls = factor, first, last, 0

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        self.calls += 1
        loss = F.cross_entropy(model(batch[0]), batch[1])
        return loss * self.factor if self.first <= self.calls <= self.last else loss


def fit(quiet: dict[str, Any], loss: Loss, max_skipped_steps: int = 20) -> Trainer:
    config = {
        **quiet,
        "global_batch_size": 4,
        "micro_batch_size": 4,
        "max_steps": 12,
        "checkpoint": {"every_steps": 6},
        "record": {"progress": "plain", "sinks": [], "logging_steps": 2},
        "precision": {
            "dtype": "fp16",
            "scaler": {"init_scale": 256.0, "max_skipped_steps": max_skipped_steps},
        },
    }
    trainer = Trainer(Task(model=lambda: nn.Linear(4, 2), loss=loss), config)
    trainer.fit(data())
    return trainer


def test_a_few_skipped_steps_are_counted_said_and_recorded(
    quiet: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    trainer = fit(quiet, Loss(math.nan, 3, 5))
    assert trainer.history.skipped_steps == 3
    assert [m.step for m in trainer.history.steps if m.is_skipped] == [3, 4, 5]
    said = capfd.readouterr().out
    assert "step 4: 2 of the last 2 steps were skipped" in said
    assert "3 of 12 steps were skipped" in said.splitlines()[-1]
    assert trainer.run_dir is not None
    recorded = open_run(trainer.run_dir).scalars()["train/skipped_steps"]
    assert recorded.values[-1] == 3


def test_a_loss_that_stays_nan_stops_the_run(quiet: dict[str, Any]) -> None:
    with pytest.raises(NonFiniteLoss, match=r"last 5 steps were skipped .* step 7, .*loss nan"):
        fit(quiet, Loss(math.nan, 3, 99), max_skipped_steps=5)


def test_a_run_whose_every_step_was_skipped_is_no_success(quiet: dict[str, Any]) -> None:
    with pytest.raises(NonFiniteLoss, match="none of the run's 12 steps changed the weights"):
        fit(quiet, Loss(1e30, 0, 99))


def test_skips_with_good_steps_between_are_not_in_a_row() -> None:
    def metrics(step: int, *, is_skipped: bool) -> StepMetrics:
        return StepMetrics(step, 1.0, 0.1, None, 4, None, is_skipped)

    said: list[str] = []
    check = LoggedSteps(History(), said.append, most_skipped=3, remedy="lower it")
    check.note([metrics(step, is_skipped=step % 3 != 0) for step in range(1, 12)])
    assert "8 of the last 11 steps were skipped" in said[0]
    with pytest.raises(NonFiniteLoss, match="last 3 steps were skipped"):
        check.note([metrics(12, is_skipped=True)])


def test_without_a_scaler_a_loss_that_is_no_number_ends_the_run_at_once() -> None:
    check = LoggedSteps(History(), lambda _: None, most_skipped=None, remedy="lower it")
    with pytest.raises(NonFiniteLoss, match="train/loss = inf at step 2"):
        check.note([StepMetrics(2, math.inf, 0.1, None, 4, None)])


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_a_loop_of_ones_own_is_checked_too(quiet: dict[str, Any], dtype: str) -> None:
    config = {
        **quiet,
        "global_batch_size": 4,
        "max_steps": 4,
        "precision": {"dtype": dtype, "scaler": {"max_skipped_steps": 2}},
    }
    loop = prepare(lambda: nn.Linear(4, 2), None, data(), config)
    loss = Loss(math.nan, 2, 99)
    with pytest.raises(NonFiniteLoss, match="step 2" if dtype == "fp32" else "last 2 steps"):
        for step in loop.steps():
            for batch in step:
                loop.backward(loss(loop.model, batch))
            loop.step()
