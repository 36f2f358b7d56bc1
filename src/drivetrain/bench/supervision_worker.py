"""What `bench supervision` trains: steps of some milliseconds, no checkpoints, on two ranks."""

from __future__ import annotations

import torch

from drivetrain.bench.workloads import Decoder
from drivetrain.config.load import load_config
from drivetrain.train.task import Task
from drivetrain.train.trainer import Trainer


def main() -> None:
    """Train for long enough that a median means something."""
    from torch import nn
    from torch.nn import functional as F
    from torch.utils.data import TensorDataset

    def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        inputs, targets = batch
        return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())

    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 512, (1024, 33), generator=generator)
    config = load_config(
        defaults={
            "global_batch_size": 8,
            "max_steps": 500,
            "checkpoint": {"every_steps": None},
            "record": {"progress": "none", "sinks": []},
        }
    )
    data = TensorDataset(tokens[:, :-1], tokens[:, 1:])
    Trainer(Task(lambda: Decoder(96, 2), loss), config).fit(data)


if __name__ == "__main__":
    main()
