"""ddp: what it asks of a model, and says when it does not get it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from drivetrain.core.errors import WorkerFailure
from drivetrain.testing import run_ranks
from drivetrain.train.task import Task
from drivetrain.train.trainer import Trainer


class HalfUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.left_out = nn.Linear(2, 1), nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.used(x)
        return y


def train_half_used(output_dir: str, finds: bool) -> float:
    config = {
        "global_batch_size": 4,
        "max_steps": 3,
        "output_dir": output_dir,
        "parallel": {"ddp": {"find_unused_parameters": finds}},
        "record": {"progress": "none", "sinks": []},
    }
    task = Task(HalfUsed, lambda model, batch: model(batch[0]).square().mean())
    return Trainer(task, config).fit(TensorDataset(torch.ones(8, 2))).losses[-1]


def test_a_weight_that_takes_no_part_is_named_before_anything_moves(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailure, match="does not depend on left_out.weight and 1 more"):
        run_ranks(train_half_used, 2, args=(str(tmp_path), False))
    first, second = run_ranks(train_half_used, 2, args=(str(tmp_path), True))
    assert first == second
