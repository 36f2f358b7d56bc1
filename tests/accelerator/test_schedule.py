"""On the device: a scheduler of the user's, groups with and without decay, the best evaluation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import OneCycleLR

from drivetrain.testing import run_ranks
from drivetrain.train.hooks import Hook
from drivetrain.train.saving.weights import weights_sha256
from drivetrain.train.trainer import Trainer
from tests.accelerator.layouts import GROUPS
from tests.accelerator.small_runs import batch_norm_task, run_in, samples, settings

sim = torch.get_device_module("sim")


class Cut(Hook):
    def __init__(self, after: int) -> None:
        self.after = after

    def on_train_batch_end(self, trainer: Trainer, step: int) -> None:
        if step == self.after:
            raise KeyboardInterrupt


def train(folder: str, parallel: dict[str, Any], hooks: list[Hook]) -> tuple[str, list[float], int]:
    run_in(folder)
    task = replace(
        batch_norm_task(), schedule=lambda optimizer, n: OneCycleLR(optimizer, 0.05, total_steps=n)
    )
    config = settings(
        12,
        parallel=parallel,
        optimization={"weight_decay": 0.1},
        evaluation={"every_steps": 3},
        checkpoint={"every_steps": 4, "keep_last": 1, "keep_best": "loss"},
    )
    trainer = Trainer(task, config, hooks)
    history = trainer.fit(samples(), samples())
    assert trainer.assembly is not None
    assert history.run_dir is not None
    best = history.best("loss")
    assert best is not None
    left = torch.load(history.run_dir / "checkpoints" / "best.pt", map_location="cpu")
    assert all(value.isfinite().all() for value in left.values())
    digest = weights_sha256(trainer.assembly.engine.spread.full_state())
    return digest, [metrics.learning_rate for metrics in history.steps], best.step


def whole_and_resumed(folder: str, parallel: dict[str, Any]) -> Any:
    sim.set_op_cost(1e-4)
    sim.set_copy_cost(5e-3)
    whole = train(f"{folder}/whole", parallel, [])
    with pytest.raises(KeyboardInterrupt):
        train(f"{folder}/parts", parallel, [Cut(7)])
    return whole, train(f"{folder}/parts", parallel, [])


@pytest.mark.parametrize(
    "strategy", ["fsdp", pytest.param("ddp", marks=[pytest.mark.slow, pytest.mark.long])]
)
def test_a_schedule_and_the_best_are_found_again(tmp_path: Path, strategy: str) -> None:
    args = (str(tmp_path), {"strategy": strategy})
    (first, second), other = run_ranks(whole_and_resumed, 2, 500, args, GROUPS["both"])
    assert first[0] == second[0], "to the last bit"
    assert second[1] == first[1][-len(second[1]) :]
    assert 0 < len(second[1]) < 12
    assert first[2] == second[2] == other[0][2]


def parts_of_a_loss(folder: str) -> list[tuple[float, dict[str, float]]]:
    run_in(folder)
    task = batch_norm_task()

    def loss(model: Any, batch: Any) -> Any:
        whole: Any = task.loss(model, batch)
        return whole, {"here": whole, "host": torch.tensor(2, device="cpu"), "plain": 0.5}

    history = Trainer(replace(task, loss=loss), settings(3)).fit(samples())
    return [(step.loss, dict(step.parts)) for step in history.steps]


def test_parts_of_a_loss_may_lie_anywhere(tmp_path: Path) -> None:
    (steps,) = run_ranks(parts_of_a_loss, 1, 120, args=(str(tmp_path),))
    for loss, parts in steps:
        assert parts == {"here": pytest.approx(loss), "host": 2.0, "plain": 0.5}
