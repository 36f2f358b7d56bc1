"""A small adapter on a frozen base: only a hundredth of the numbers are trained.

drivetrain train examples/adapter.py --nproc-per-node 2 checkpoint.contents=trained
"""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from drivetrain import Task, Trainer, load_config

WIDTH, RANK = 512, 4


class Adapted(nn.Module):
    """A frozen layer, plus the product of two thin matrices that are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.down = nn.Linear(WIDTH, RANK, bias=False)
        self.up = nn.Linear(RANK, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.base(x) + self.up(self.down(x))
        return found.relu()


def make_model() -> nn.Module:
    torch.manual_seed(int(os.environ.get("BASE_SEED", "0")))  # a pretrained base would be read here
    return nn.Sequential(*(Adapted() for _ in range(4)))


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    inputs, targets = batch
    return F.mse_loss(model(inputs), targets)


def main() -> None:
    config = load_config(
        defaults={
            "name": "adapter",
            "global_batch_size": 32,
            "micro_batch_size": 16,
            "max_steps": 20,
        }
    )
    numbers = torch.randn(256, WIDTH, generator=torch.Generator().manual_seed(1))
    Trainer(Task(make_model, loss), config).fit(TensorDataset(numbers, numbers.roll(1, dims=1)))


if __name__ == "__main__":
    main()
