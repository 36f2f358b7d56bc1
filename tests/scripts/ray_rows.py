"""A run on a Ray Data dataset; with `plain` on a list of the same rows, and no Ray."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from drivetrain import Task, Trainer, load_config

ROWS = [{"x": np.full(4, n / 40, np.float32), "y": np.float32(n % 3)} for n in range(40)]


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.mse_loss(model(batch["x"]).squeeze(1), batch["y"].float())


def rows() -> Any:
    if "plain" in sys.argv:
        sys.argv.remove("plain")
        return Plain()
    import ray

    return ray.data.from_items(ROWS, override_num_blocks=4)


class Plain(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(ROWS)


if __name__ == "__main__":
    data = rows()
    config = load_config(
        defaults={
            "global_batch_size": 8,
            "micro_batch_size": 4,
            "max_steps": 12,
            "checkpoint": {"every_steps": 4},
            "record": {"progress": "none", "sinks": [], "logging_steps": 1},
        }
    )
    Trainer(Task(lambda: nn.Linear(4, 1), loss), config).fit(data)
