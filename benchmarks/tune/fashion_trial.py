"""One trial of `benchmarks.tune.fashion`: a small convolutional network on Fashion-MNIST.

The data are Debian's (`apt-get install dataset-fashion-mnist`): 60,000 images to train on and
10,000 to validate with, each of them at every evaluation.
"""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from drivetrain import Task, Total, Trainer, load_config

FOLDER = Path("/usr/share/datasets/fashion-mnist")


class Network(nn.Module):
    """Two convolutions; images come as bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 8, 5, stride=2, padding=2),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(16 * 7 * 7, 10),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layers((images.float() / 255 - 0.286) / 0.353)
        return logits


def read(part: str) -> TensorDataset:
    """The bytes behind each file's header, whose fourth byte says how many sizes it has."""
    found = []
    for kind in ("images-idx3", "labels-idx1"):
        data = gzip.decompress((FOLDER / f"{part}-{kind}-ubyte.gz").read_bytes())
        found.append(torch.from_numpy(np.frombuffer(data, np.uint8, offset=4 + 4 * data[3]).copy()))
    return TensorDataset(found[0].reshape(-1, 1, 28, 28), found[1].long())


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def metrics(model: nn.Module, batch: Any) -> dict[str, Any]:
    logits = model(batch[0])
    right = (logits.argmax(1) == batch[1]).sum()
    return {"loss": F.cross_entropy(logits, batch[1]), "accuracy": Total(right, len(batch[1]))}


def main() -> None:
    config = load_config(
        defaults={
            "name": "fashion",
            "global_batch_size": 128,
            "max_steps": 90,
            "evaluation": {"every_steps": 30, "batch_size": 1000},
            "optimization": {"optimizer": "sgd", "lr_scheduler_type": "cosine"},
            "record": {"sinks": [], "system_every_s": None},
        }
    )
    Trainer(Task(Network, loss, metrics=metrics), config).fit(read("train"), read("t10k"))


if __name__ == "__main__":
    main()
