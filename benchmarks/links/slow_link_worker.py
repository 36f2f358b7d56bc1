"""What `bench slow-link` trains, job after job, as one of two hosts.

A wide network on vectors whose class a random teacher has told: few operations per weight, so that
sending 17 MB of gradients is what a step waits for on a slow link.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

from drivetrain.train.history import EvaluationResult
from drivetrain.train.hooks import Hook
from drivetrain.train.task import Task
from drivetrain.train.trainer import Trainer

_INPUTS, _WIDTH, _CLASSES = 256, 1920, 10
_BATCH, _HELD_OUT, _EVALUATE_EVERY = 64, 256, 8
Sample = tuple[torch.Tensor, torch.Tensor]


class Taught(Dataset[Sample]):
    """Vectors, and the class a fixed random teacher gives them."""

    def __init__(self, length: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(0)
        teacher = torch.randn(_INPUTS, _CLASSES, generator=generator)
        self._inputs = torch.randn(length, _INPUTS, generator=generator.manual_seed(seed))
        self._classes = (self._inputs @ teacher).argmax(1)

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, index: int) -> Sample:
        return self._inputs[index], self._classes[index]


def make_model() -> nn.Module:
    """4.2 million weights, nearly all of them in one matrix."""
    return nn.Sequential(
        nn.Linear(_INPUTS, _WIDTH),
        nn.ReLU(),
        nn.Linear(_WIDTH, _WIDTH),
        nn.ReLU(),
        nn.Linear(_WIDTH, _CLASSES),
    )


def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """Which of the classes."""
    return F.cross_entropy(model(batch[0]), batch[1])


class Reached(Exception):
    """The held-out loss is there: nothing more to be timed."""


class Watch(Hook):
    """Times the steps, not the evaluations, and ends the run when the target is reached."""

    def __init__(self, target: float | None) -> None:
        self._target = target
        self._began_s = 0.0
        self.step_s: list[float] = []
        self.curve: list[tuple[int, float, float]] = []
        """After so many steps, so many seconds of training: the held-out loss."""

    def on_train_batch_start(self, trainer: Trainer, step: int) -> None:  # noqa: ARG002
        self._began_s = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, step: int) -> None:  # noqa: ARG002
        self.step_s.append(time.perf_counter() - self._began_s)

    def on_validation_end(self, trainer: Trainer, result: EvaluationResult) -> None:  # noqa: ARG002
        value = result.metrics["loss"]
        self.curve.append((result.step, sum(self.step_s), value))
        if self._target is not None and value <= self._target:
            raise Reached


def run_job(job: dict[str, Any]) -> dict[str, Any]:
    """One training; how it went."""
    watch = Watch(job["target"])
    with tempfile.TemporaryDirectory(prefix="slow-link-") as folder:
        config = {
            "global_batch_size": _BATCH,
            "max_steps": job["max_steps"],
            "seed": job["seed"],
            "output_dir": folder,
            "optimization": {"learning_rate": 1e-3},
            "evaluation": {"every_steps": _EVALUATE_EVERY, "batch_size": 64},
            "checkpoint": {"every_steps": None},
            "record": {"progress": "none", "sinks": [], "logging_steps": 1000},
            **job["changes"],
        }
        trainer = Trainer(Task(make_model, loss), config, hooks=[watch])
        held_out = Taught(_HELD_OUT, 1) if job["target"] is not None else None
        is_reached = False
        try:
            trainer.fit(Taught(65_536, 2), held_out)
        except Reached:
            is_reached = True
    return {
        "arm": job["arm"],
        "seed": job["seed"],
        "is_reached": is_reached,
        "steps": len(watch.step_s),
        "seconds": sum(watch.step_s),
        "median_step_s": median(watch.step_s),
        "compression": trainer.config.communication.compression,
        "curve": watch.curve,
        "step_s": watch.step_s,
    }


def main() -> None:
    """Each job's outcome goes into a file as soon as it is known."""
    torch.set_num_threads(1)
    jobs, results = Path(sys.argv[1]), Path(sys.argv[2])
    for job in json.loads(jobs.read_text()):
        outcome = run_job(job)
        if os.environ["RANK"] == "0":
            with results.open("a") as file:
                file.write(json.dumps(outcome) + "\n")


if __name__ == "__main__":
    main()
