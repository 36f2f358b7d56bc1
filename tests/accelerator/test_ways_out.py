"""On the device: whole weights, averages, adapters and shared statistics, killed and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain.testing import run_ranks
from drivetrain.train.ema import EMA
from drivetrain.train.hooks import Hook
from drivetrain.train.saving.weights import weights_sha256
from drivetrain.train.task import Task
from drivetrain.train.trainer import Trainer
from tests.accelerator.layouts import GROUPS
from tests.accelerator.small_runs import batch_norm_task, run_in, samples, settings
from tests.ranks.resuming import Interrupted

sim = torch.get_device_module("sim")


class _Stop(Hook):
    def on_train_batch_end(self, trainer: Trainer, step: int) -> None:
        if step == 5:
            raise Interrupted


def task() -> Task:
    plain = batch_norm_task()

    def model() -> nn.Module:
        made = plain.model()
        assert isinstance(made, nn.Sequential)
        made[0].requires_grad_(False)
        return made

    return Task(model, plain.loss)


def train(folder: str, stops: bool, **more: Any) -> list[str]:
    run_in(folder)
    ema = EMA(decay=0.9)
    config = settings(6, evaluation={"every_steps": 3}, **more)
    config["checkpoint"] = {"every_steps": 2, "contents": "trained"}
    trainer = Trainer(task(), config, hooks=[ema, *([_Stop()] if stops else [])])
    if stops:
        with pytest.raises(Interrupted):
            trainer.fit(samples(), samples())
        return []
    history = trainer.fit(samples(), samples())
    state = trainer.full_state_dict()
    assert {str(tensor.device) for tensor in state.values()} <= {"cpu"}
    with ema.applied():
        averages = trainer.full_state_dict()
    evaluations = str([result.metrics for result in history.evaluations])
    return [weights_sha256(state), weights_sha256(averages), evaluations]


def killed_and_whole(folder: str) -> list[tuple[list[str], list[str]]]:
    sim.set_copy_cost(0.005)  # what changes too early is saved wrong
    found = []
    shares = {"sync_batch_norm": True}
    fsdp = {"strategy": "fsdp", **shares}
    runs: dict[str, dict[str, Any]] = {
        "ddp": {"parallel": shares},
        "fsdp": {"parallel": fsdp},
        "offloaded": {"parallel": fsdp, "memory": {"offload": "cpu"}},
    }
    for name, more in runs.items():
        whole = train(f"{folder}/{name}-whole", False, **more)
        train(f"{folder}/{name}", True, **more)
        found.append((whole, train(f"{folder}/{name}", False, **more)))
    return found


@pytest.mark.slow
def test_what_leaves_the_device_is_right_and_resumed_to_the_bit(tmp_path: Path) -> None:
    for whole, resumed in run_ranks(
        killed_and_whole, 2, 300, args=(str(tmp_path),), backend=GROUPS["both"]
    )[0]:
        assert whole == resumed
        assert whole[0] != whole[1]
