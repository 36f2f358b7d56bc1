"""Handwritten digits under DeepSpeed's ZeRO; the stage comes from a JSON file beside this one.

drivetrain train examples/deepspeed/train.py --nproc-per-node 2 \
    parallel.deepspeed.config=examples/deepspeed/zero2.json
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset, random_split

from drivetrain import Task, Total, Trainer, load_config

Batch = tuple[torch.Tensor, torch.Tensor]


def model() -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Dropout(0.1)) for _ in range(3)]
    return nn.Sequential(nn.Linear(64, 256), *blocks, nn.Linear(256, 10))


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    pixels, digits = batch
    return F.cross_entropy(model(pixels), digits)


def metrics(model: nn.Module, batch: Batch) -> dict[str, Total]:
    pixels, digits = batch
    return {"accuracy": Total((model(pixels).argmax(1) == digits).sum(), len(digits))}


def main() -> None:
    config = load_config(
        defaults={
            "name": "zero",
            "global_batch_size": 64,
            "micro_batch_size": 16,
            "num_train_epochs": 4,
            "optimization": {"learning_rate": 2e-3, "max_grad_norm": 1.0},
            "parallel": {"strategy": "deepspeed"},
        }
    )
    digits = load_digits()
    data = TensorDataset(
        torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    )
    train, val = random_split(data, [0.9, 0.1], generator=torch.Generator().manual_seed(0))
    Trainer(Task(model, loss, metrics=metrics), config).fit(train, val)


if __name__ == "__main__":
    main()
