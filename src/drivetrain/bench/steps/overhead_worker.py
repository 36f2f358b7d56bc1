"""One rank of `drivetrain bench overhead`: all arms in one process group, in interleaved blocks.

`Trainer.fit` is the arm that leads: at the end of each of its blocks a hook lets every other arm
run a block of as many steps. So each round holds one block of each arm, seconds apart.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch.distributed as dist

from drivetrain.bench.steps import arms
from drivetrain.bench.steps.arms import Run
from drivetrain.bench.steps.interleaved import WARM_UP_ROUNDS
from drivetrain.bench.steps.workloads import (
    LEARNING_RATE,
    MAX_GRAD_NORM,
    Workload,
    near_empty,
    transformer,
)
from drivetrain.train.hooks import Hook
from drivetrain.train.task import Task
from drivetrain.train.trainer import Trainer

OURS = "drivetrain"


class Rounds(Hook):
    """Times Trainer's own blocks, and gives every other arm its turn between them."""

    def __init__(self, workload: Workload, others: dict[str, Run]) -> None:
        self.seconds_per_step: dict[str, list[float]] = {name: [] for name in (OURS, *others)}
        self._others = others
        self._size = workload.steps_per_block
        self._steps = 0
        self._began_s = 0.0
        self._shuffle = random.Random(0)  # noqa: S311 - the same order on every rank

    def on_fit_start(self, trainer: Trainer) -> None:
        """The first block begins."""
        del trainer
        self._began_s = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, step: int) -> None:
        """At the end of a block: note its time, run the others, begin the next."""
        del trainer, step
        self._steps += 1
        if self._steps % self._size:
            return
        self._note(OURS)
        order = list(self._others)
        self._shuffle.shuffle(order)
        for name in order:
            self._began_s = time.perf_counter()
            self._others[name](self._size)
            self._note(name)
        self._began_s = time.perf_counter()

    def _note(self, name: str) -> None:
        elapsed_s = time.perf_counter() - self._began_s
        self.seconds_per_step[name].append(elapsed_s / self._size)
        if dist.is_initialized():
            dist.barrier()


BARE = {"1 rank": arms.bare, "ddp": arms.bare_ddp, "fsdp": arms.bare_fsdp}


def measure(
    workload: Workload, engine: str, num_rounds: int, directory: str
) -> dict[str, list[float]]:
    """Seconds per step of every arm, round by round, the warm-up left out."""
    bare = BARE[engine]
    others = {"bare": bare(workload), "bare again": bare(workload)}
    if engine != "fsdp":
        others["accelerate"] = arms.accelerate(workload)
        others["fabric"] = arms.fabric(workload)
    return led_by_trainer(
        workload,
        others,
        num_rounds,
        global_batch_size=workload.batch_size * int(os.environ["WORLD_SIZE"]),
        output_dir=directory,
        parallel={"strategy": "fsdp" if engine == "fsdp" else "ddp"},
    )


def led_by_trainer(
    workload: Workload, others: dict[str, Run], num_rounds: int, **settings: Any
) -> dict[str, list[float]]:
    """Blocks of `Trainer.fit` with `settings`, and of every other arm between them."""
    rounds = Rounds(workload, others)
    config = {
        "max_steps": workload.steps_per_block * (num_rounds + WARM_UP_ROUNDS),
        "optimization": {
            "learning_rate": LEARNING_RATE,
            "max_grad_norm": MAX_GRAD_NORM,
            "lr_scheduler_type": "cosine",
        },
        "checkpoint": {"every_steps": None},  # the other arms save nothing either
        # at least once in every block, so that no block goes without the cost of logging
        "record": {"logging_steps": min(10, workload.steps_per_block)},
        **settings,
    }
    Trainer(Task(workload.model, workload.loss), config, [rounds]).fit(workload.dataset())
    return {name: values[WARM_UP_ROUNDS:] for name, values in rounds.seconds_per_step.items()}


def main() -> None:
    """`… OUTPUT NUM_ROUNDS`: rank 0 writes the raw samples as JSON."""
    output, num_rounds = Path(sys.argv[1]), int(sys.argv[2])
    warnings.filterwarnings("ignore")  # the frameworks' own advice on CPUs and loaders
    alone = os.environ["WORLD_SIZE"] == "1"
    if not alone:
        dist.init_process_group("gloo")
    engines = ("1 rank",) if alone else ("ddp", "fsdp")
    trainings = [(engine, make()) for engine in engines for make in (near_empty, transformer)]
    with tempfile.TemporaryDirectory() as directory:
        samples = {
            f"{engine}, {workload.name}": measure(workload, engine, num_rounds, directory)
            for engine, workload in trainings
        }
    if os.environ["RANK"] == "0":
        output.write_text(json.dumps(samples))
    if not alone:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
