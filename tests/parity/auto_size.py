"""A script that sets no micro_batch_size; its argument is its loss.

`sum` and `weight` depend on the size of a micro-batch, `total` is the weighted mean written so that
it does not.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from drivetrain.config.load import load_config
from drivetrain.train.task import Loss, Task, Total
from drivetrain.train.trainer import Trainer

KIND = sys.argv[1]
WEIGHTS = torch.tensor([1.0, 3.0])


def loss(model: nn.Module, batch: Any) -> Loss:
    x, y = batch
    if KIND == "sum":
        return F.cross_entropy(model(x), y, reduction="sum")
    if KIND == "weight":
        return F.cross_entropy(model(x), y, weight=WEIGHTS)
    total = F.cross_entropy(model(x), y, weight=WEIGHTS, reduction="sum")
    return Total(total, WEIGHTS[y].sum())


def main() -> None:
    defaults = {
        "global_batch_size": 32,
        "optimization": {"optimizer": "sgd", "learning_rate": 0.01},
    }
    config = load_config(argv=sys.argv[2:], defaults=defaults)
    x = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))
    Trainer(Task(lambda: nn.Linear(8, 2), loss), config).fit(
        TensorDataset(x, (x.sum(1) > 0).long())
    )


if __name__ == "__main__":
    main()
