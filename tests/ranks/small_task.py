"""A model and data that train in milliseconds, dropout and shuffling included."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from drivetrain.train.task import Task


def small_task(width: int = 256) -> Task:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(4, width), nn.Dropout(0.2), nn.Linear(width, 3))

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    return Task(model=model, loss=loss)


def samples(length: int = 40) -> TensorDataset:
    inputs = torch.randn(length, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, inputs.argmax(1) % 3)
