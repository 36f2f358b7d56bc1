"""What `benchmarks parameter-server` trains, job after job, on each rank.

Computing is emulated by waiting, so that ranks which share few cores do not slow each other: what
is measured is who waits for whom, not a device.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

from benchmarks.links.slow_link_worker import Taught, loss
from drivetrain.train.hooks import Hook
from drivetrain.train.task import Task
from drivetrain.train.trainer import Trainer

_INPUTS, _CLASSES, _HELD_OUT = 256, 10, 2048
_ROWS, _WIDTH, _WORDS = 50_000, 32, 8
Sample = tuple[torch.Tensor, torch.Tensor]


class Wait(Hook):
    """In place of computing: alike on all ranks, longer on one, or now and then on each."""

    def __init__(self, ranks: str, step_s: float, seed: int) -> None:
        self._ranks, self._step_s = ranks, step_s
        self._draw = random.Random(seed)  # noqa: S311 - no secret
        self.training_s = 0.0
        self._began_s: float | None = None

    def on_train_batch_start(self, trainer: Trainer, step: int) -> None:  # noqa: ARG002
        if self._began_s is None:
            self._began_s = time.perf_counter()
        assert trainer.assembly is not None  # noqa: S101 - a benchmark's own
        world = trainer.assembly.world
        times = [self._draw.random() for _ in range(world.layout.world_size)]
        longer = self._ranks == "one slow" and world.rank == 1
        longer |= self._ranks == "slow in turns" and times[world.rank] < 0.1
        time.sleep(self._step_s * (4 if longer else 1))

    def on_train_batch_end(self, trainer: Trainer, step: int) -> None:  # noqa: ARG002
        if self._began_s is not None:
            self.training_s = time.perf_counter() - self._began_s


class Words(Dataset[Sample]):
    """A few rows of a large table each, and the class that they vote for."""

    def __init__(self, length: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self._words = torch.randint(_ROWS, (length, _WORDS), generator=generator)
        self._classes = self._words.sum(1) % _CLASSES

    def __len__(self) -> int:
        return len(self._words)

    def __getitem__(self, index: int) -> Sample:
        return self._words[index], self._classes[index]


def small_model() -> nn.Module:
    return nn.Sequential(nn.Linear(_INPUTS, 128), nn.ReLU(), nn.Linear(128, _CLASSES))


def embedding_model() -> nn.Module:
    """1.6 million weights, of which a step touches few."""
    return nn.Sequential(nn.EmbeddingBag(_ROWS, _WIDTH), nn.Linear(_WIDTH, _CLASSES))


def bag_loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def run_jobs(jobs: list[dict[str, Any]], results: str) -> None:
    """Each job's outcome goes into a file as soon as it is known."""
    torch.set_num_threads(1)
    for job in jobs:
        outcome = run_job(job)
        if outcome is not None:
            with Path(results).open("a") as file:
                file.write(json.dumps(outcome) + "\n")


def run_job(job: dict[str, Any]) -> dict[str, Any] | None:
    """One training; how it went, on rank 0. A collective call."""
    wait = Wait(job["ranks"], job["step_s"], job["seed"])
    is_sparse = job["part"] == "embedding"
    make, step_loss = (embedding_model, bag_loss) if is_sparse else (small_model, loss)
    data: Dataset[Sample] = Words(65_536) if is_sparse else Taught(65_536, 2)
    held_out = None if is_sparse else Taught(_HELD_OUT, 1)
    with tempfile.TemporaryDirectory(prefix="parameter-server-") as folder:
        config = {
            "global_batch_size": job["batch"],
            "max_steps": job["steps"],
            "seed": job["seed"],
            "output_dir": folder,
            "evaluation": {"every_steps": job["steps"], "batch_size": 256},
            "checkpoint": {"every_steps": None},
            "record": {"progress": "none", "sinks": [], "logging_steps": job["steps"]},
            **job["changes"],
        }
        trainer = Trainer(Task(make, step_loss), config, hooks=[wait])
        history = trainer.fit(data, held_out)
        assert trainer.assembly is not None  # noqa: S101 - a benchmark's own
        world, spread = trainer.assembly.world, trainer.assembly.engine.spread
        times = [0.0] * world.layout.world_size
        times[world.rank] = wait.training_s
        by_rank = world.sum_floats(times)
        staleness, links = getattr(spread, "staleness", None), getattr(spread, "_links", None)
        own = [0.0, 0.0] if staleness is None else [staleness.total, staleness.num_pushes]
        total, pushes = world.sum_floats([float(value) for value in own])
        largest = [0.0] * world.layout.world_size
        largest[world.rank] = 0.0 if staleness is None else float(staleness.largest)
        most = max(world.sum_floats(largest))
        sent = world.sum_floats([0.0 if links is None else float(links.sent_bytes)])[0]
    if not world.is_main:
        return None
    kept = ("part", "arm", "ranks", "seed", "steps")
    return {key: job[key] for key in kept} | {
        "train_losses": history.losses,
        "held_out_loss": None if held_out is None else history.evaluations[-1].metrics["loss"],
        "seconds_by_rank": by_rank,
        "staleness_mean": None if staleness is None else total / (pushes or 1.0),
        "staleness_max": None if staleness is None else most,
        "sent_bytes_per_rank_and_step": None
        if links is None
        else sent / job["steps"] / world.layout.world_size,
    }
