"""A contrastive loss over all ranks' batches: match the upper and lower halves of digits.

python examples/clip.py
drivetrain train examples/clip.py --nproc-per-node 2
drivetrain train examples/clip.py --nproc-per-node 2 parallel.strategy=fsdp
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Subset, TensorDataset

from drivetrain import Task, Trainer, gather, load_config


class Clip(nn.Module):
    """Two towers and a learned scale (temperature) of their similarity."""

    def __init__(self) -> None:
        super().__init__()
        self.upper, self.lower = self._tower(), self._tower()
        self.scale = nn.Parameter(torch.tensor([2.0]))  # 1-D, because fsdp cannot shard a scalar

    @staticmethod
    def _tower() -> nn.Module:
        return nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 32))

    def forward(self, upper: torch.Tensor, lower: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return F.normalize(self.upper(upper)), F.normalize(self.lower(lower)), self.scale.exp()


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    upper, lower, scale = model(*batch)
    logits = scale * gather(upper) @ gather(lower).T  # over all ranks' samples
    own = torch.arange(len(logits), device=logits.device)
    return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2


def main() -> None:
    images = torch.tensor(load_digits().data / 16, dtype=torch.float32)
    data = TensorDataset(images[:, :32], images[:, 32:])
    train, val = Subset(data, range(1500)), Subset(data, range(1500, len(data)))
    config = load_config(
        defaults={
            "global_batch_size": 128,  # without micro_batch_size, a rank computes its share at once
            "max_steps": 40,
            "evaluation": {"every_steps": 20, "batch_size": 64},
            "optimization": {"learning_rate": 3e-3},
            "record": {"logging_steps": 20},
        }
    )
    Trainer(Task(Clip, loss), config).fit(train, val)


if __name__ == "__main__":
    main()
