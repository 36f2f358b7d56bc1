"""A regression of four numbers; a learning rate that is far too high ends in a loss of nan."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from drivetrain import Task, Trainer, load_config


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    time.sleep(float(os.environ.get("TUNED_SLEEP_S", "0")))
    return F.mse_loss(model(batch[0]), batch[1])


def main() -> None:
    config = load_config(
        defaults={
            "global_batch_size": 8,
            "micro_batch_size": 4,
            "max_steps": 12,
            "evaluation.every_steps": 4,
            "checkpoint.every_steps": 2,
            "optimization": {"optimizer": "sgd", "lr_scheduler_type": "cosine"},
            "record": {"sinks": [], "system_every_s": None},
        }
    )
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x.sum(1, keepdim=True))
    Trainer(Task(lambda: nn.Linear(4, 1), loss, metrics=_metrics), config).fit(data, data)


def _metrics(model: nn.Module, batch: Any) -> dict[str, Any]:
    return {"loss": loss(model, batch)}


if __name__ == "__main__":
    main()
