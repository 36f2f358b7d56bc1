"""What `bench recovery` and `bench supervision` train: small, saved often, its processes known."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks.faults.recovery import PIDS
from drivetrain.config.load import load_config
from drivetrain.train.task import Task
from drivetrain.train.trainer import Trainer


def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """Which of ten classes."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs), targets)


def main() -> None:
    """Leave the process id where the bench finds it, and train."""
    if PIDS in os.environ:
        (Path(os.environ[PIDS]) / f"{os.environ['RANK']}-{os.getpid()}").touch()
    config = load_config(
        defaults={
            "global_batch_size": 64,
            "micro_batch_size": 16,
            "checkpoint": {"every_steps": 1},
            "record": {"progress": "none", "sinks": []},
        }
    )
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(
        torch.randn(2048, 256, generator=generator),
        torch.randint(0, 10, (2048,), generator=generator),
    )
    task = Task(lambda: nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10)), loss)
    Trainer(task, config).fit(data)


if __name__ == "__main__":
    main()
