"""What `bench supervision` trains: steps of some milliseconds, no checkpoints, on two ranks."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.faults.supervision import TIMES
from benchmarks.steps.workloads import Decoder
from drivetrain.config.load import load_config
from drivetrain.train.hooks import Hook
from drivetrain.train.task import Task
from drivetrain.train.trainer import Trainer

_NUM_STEPS = 3200


class Stopwatch(Hook):
    """When each step ended, by the clock that all processes share."""

    def __init__(self) -> None:
        self._ended: list[float] = []

    def on_fit_start(self, trainer: Trainer) -> None:
        """Say which processes are the ranks: everybody else watches."""
        pids = [0] * dist.get_world_size()
        dist.all_gather_object(pids, os.getpid())
        if trainer.is_main:
            Path(os.environ[TIMES]).write_text(" ".join(map(str, pids)))

    def on_train_batch_end(self, trainer: Trainer, step: int) -> None:  # noqa: ARG002
        """Note the time."""
        self._ended.append(time.monotonic())

    def on_fit_end(self, trainer: Trainer) -> None:
        """Hand the times over."""
        if trainer.is_main:
            Path(os.environ[TIMES]).write_text(json.dumps(self._ended))


def main() -> None:
    """Train for long enough that a supervisor can be stopped and let go on many times."""
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
            "max_steps": _NUM_STEPS,
            "checkpoint": {"every_steps": None},
            "record": {"progress": "none", "sinks": []},
        }
    )
    data = TensorDataset(tokens[:, :-1], tokens[:, 1:])
    Trainer(Task(lambda: Decoder(96, 2), loss), config, hooks=[Stopwatch()]).fit(data)


if __name__ == "__main__":
    main()
