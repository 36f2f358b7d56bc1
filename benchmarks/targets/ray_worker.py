"""What `bench ray` trains, twice: with Drivetrain's Trainer, and as a bare DDP loop.

Both make the same number of steps on the same model and write down, on rank 0, when each ended.
As a script it is the first: python -m benchmarks.targets.ray_worker
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from benchmarks.steps.workloads import Decoder
from drivetrain.config.load import load_config
from drivetrain.train.hooks import Hook
from drivetrain.train.task import Task
from drivetrain.train.trainer import Trainer

TIMES = "DRIVETRAIN_BENCH_TIMES"
"""Where rank 0 writes down when its steps ended."""
NUM_STEPS, _BATCH, _LEARNING_RATE = 300, 8, 1e-3


def _data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 512, (NUM_STEPS * _BATCH, 33), generator=generator)
    return TensorDataset(tokens[:, :-1], tokens[:, 1:])


def _loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


def bare_loop(config: dict[str, Any]) -> None:
    """A Ray Train worker as Ray's own guide has it: DDP, a DataLoader, a loop."""
    from ray.train.torch import prepare_model

    model = prepare_model(Decoder(96, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE)
    world_size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    data = _data()
    sampler: DistributedSampler[Any] = DistributedSampler(data, world_size, rank)
    ended = []
    for batch in DataLoader(data, _BATCH // world_size, sampler=sampler):
        optimizer.zero_grad()
        _loss(model, batch).backward()
        optimizer.step()
        ended.append(time.time())
    if rank == 0:
        Path(config["times"]).write_text(json.dumps(ended))


class Stopwatch(Hook):
    """When each step ended, by the clock that all processes share."""

    def __init__(self) -> None:
        self._ended: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, step: int) -> None:  # noqa: ARG002
        """Note the time."""
        self._ended.append(time.time())

    def on_fit_end(self, trainer: Trainer) -> None:
        """Hand the times over."""
        if trainer.is_main:
            Path(os.environ[TIMES]).write_text(json.dumps(self._ended))


def main() -> None:
    """The same with Drivetrain."""
    config = load_config(
        defaults={
            "global_batch_size": _BATCH,
            "max_steps": NUM_STEPS,
            "optimization": {"learning_rate": _LEARNING_RATE},
            "checkpoint": {"every_steps": None},
            "record": {"progress": "none", "sinks": []},
        }
    )
    Trainer(Task(lambda: Decoder(96, 2), _loss), config, hooks=[Stopwatch()]).fit(_data())


if __name__ == "__main__":
    main()
