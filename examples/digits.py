"""Handwritten digits (included in scikit-learn) on any number of processes.

python examples/digits.py
drivetrain train examples/digits.py --nproc-per-node 2
drivetrain train examples/digits.py --nproc-per-node 4 optimization.learning_rate=1e-3
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Subset, TensorDataset

from drivetrain import Task, Total, Trainer, load_config


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def metrics(model: nn.Module, batch: Any) -> dict[str, Any]:
    images, labels = batch
    logits = model(images)
    right = (logits.argmax(1) == labels).sum()
    return {"loss": F.cross_entropy(logits, labels), "accuracy": Total(right, len(labels))}


def main() -> None:
    config = load_config(
        defaults={
            "name": "digits",
            "global_batch_size": 64,
            "micro_batch_size": 16,
            "num_train_epochs": 15,
            "optimization": {"learning_rate": 3e-3},
        }
    )
    digits = load_digits()
    data = TensorDataset(
        torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    )
    train, val = Subset(data, range(1500)), Subset(data, range(1500, len(data)))
    trainer = Trainer(Task(make_model, loss, metrics=metrics), config)
    history = trainer.fit(train, val)
    if trainer.is_main:
        print(f"best accuracy {history.best_accuracy:.4f} in {history.total_time:.1f} s")


if __name__ == "__main__":
    main()
