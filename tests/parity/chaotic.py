"""A script that parts from itself: each step makes a difference of one bit several times larger.

Going down a cosine with far too long steps is a chaotic map. After a dozen steps what was the last
bit is the first one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from drivetrain.config.load import load_config
from drivetrain.config.schema import Optimization
from drivetrain.train.task import Task
from drivetrain.train.trainer import Trainer


class Waves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.linspace(0.1, 3.0, 64))

    def forward(self, heights: torch.Tensor) -> torch.Tensor:
        return heights @ torch.cos(self.places)


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    mean: torch.Tensor = model(batch[0]).mean()
    return mean


def sgd(parameters: Any, settings: Optimization) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, settings.learning_rate)


def main() -> None:
    config = load_config(
        defaults={
            "global_batch_size": 16,
            "micro_batch_size": 2,
            "optimization": {"learning_rate": 8.0},
        }
    )
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(1 + 0.1 * torch.randn(64, 64, generator=generator))
    Trainer(Task(Waves, loss, optimizer=sgd), config).fit(data)


if __name__ == "__main__":
    main()
