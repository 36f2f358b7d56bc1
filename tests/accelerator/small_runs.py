"""Small runs in a folder of their own, on whatever device the process has."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from drivetrain.record import session
from drivetrain.train.task import Task
from drivetrain.train.trainer import Trainer

WIDTH = 64


def batch_norm_task() -> Task:
    """Running statistics change in every forward, dropout draws from the device's stream."""

    def model() -> nn.Module:
        return nn.Sequential(
            nn.Linear(8, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, 3)
        )

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    return Task(model=model, loss=loss)


def samples() -> TensorDataset:
    inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, inputs.argmax(1) % 3)


def settings(steps: int, **more: Any) -> dict[str, Any]:
    return {
        "global_batch_size": 16,
        "micro_batch_size": 4,
        "max_steps": steps,
        "optimization": {"learning_rate": 1e-2, "max_grad_norm": 1.0},
        "record": {"progress": "none", "sinks": [], "logging_steps": 50},
        "checkpoint": {"every_steps": 4, "keep_last": 9},
        **more,
    }


def run_in(folder: str) -> None:
    """The next fit() of this process is the run in that folder, as after a new start."""
    os.environ[session.RUN_DIR] = folder
    session._opened = 0


def resume(folder: str, steps: int) -> list[float]:
    """Resume, on whatever this process has."""
    run_in(folder)
    history = Trainer(batch_norm_task(), settings(steps)).fit(samples())
    return history.losses
