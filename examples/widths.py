"""Handwritten digits with a network of any width: search on narrow ones, predict for a wide one.

drivetrain tune examples/widths.py --space examples/widths_space.yaml --study studies/w64 --trials 10 --sampler qmc --width 64
drivetrain tune predict studies/w32:32 studies/w64:64 studies/w128:128 --for 1024
"""  # noqa: E501

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Subset, TensorDataset

from drivetrain import Task, Trainer, load_config


def make_model(width: int) -> nn.Module:
    return nn.Sequential(
        *(nn.Linear(64, width), nn.ReLU()),
        *(nn.Linear(width, width), nn.ReLU()),
        nn.Linear(width, 10),
    )


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=64)
    width = parser.parse_known_args()[0].width
    config = load_config(
        defaults={
            "name": f"width-{width}",
            "global_batch_size": 64,
            "micro_batch_size": 64,
            "max_steps": 60,
            "evaluation": {"every_steps": 60},
            "optimization": {"learning_rate": 3e-3},
        }
    )
    digits = load_digits()
    images = torch.tensor(digits.data / 16, dtype=torch.float32)
    data = TensorDataset(images, torch.tensor(digits.target))
    train, val = Subset(data, range(1500)), Subset(data, range(1500, len(data)))
    Trainer(Task(lambda: make_model(width), loss), config).fit(train, val)


if __name__ == "__main__":
    main()
