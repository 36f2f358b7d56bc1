"""One rank of `benchmarks overhead`: all arms in one process group, in interleaved blocks.

`Trainer.fit` is the arm that leads: at the end of each of its blocks a hook lets every other arm
run a block of as many steps. So each round holds one block of each arm, seconds apart.

Beside the clock, a block's processor time is measured: what else runs on the machine makes a step
take longer by the clock, and hardly by what it uses.
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

import torch
import torch.distributed as dist

from benchmarks.report import PROCESSOR, TRAINING_THREAD
from benchmarks.steps import arms
from benchmarks.steps.arms import Run
from benchmarks.steps.device import meet, own_accelerator
from benchmarks.steps.interleaved import WARM_UP_ROUNDS
from benchmarks.steps.workloads import (
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
MEASURES = {
    "": time.perf_counter,
    TRAINING_THREAD: time.thread_time,
    PROCESSOR: time.process_time,
}
"""What a training's name ends in → a clock to measure its blocks by."""
Samples = dict[str, dict[str, list[float]]]
"""training → arm → seconds per step, round by round"""


class Rounds(Hook):
    """Times Trainer's own blocks, and gives every other arm its turn between them."""

    def __init__(self, workload: Workload, others: dict[str, Run]) -> None:
        self.seconds_per_step: Samples = {
            measure: {name: [] for name in (OURS, *others)} for measure in MEASURES
        }
        self._others = others
        self._size = workload.steps_per_block
        self._steps = 0
        self._began = _readings()
        self._shuffle = random.Random(0)  # noqa: S311 - the same order on every rank

    def on_fit_start(self, trainer: Trainer) -> None:
        """The first block begins."""
        del trainer
        self._began = _readings()

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
            self._began = _readings()
            self._others[name](self._size)
            self._note(name)
        self._began = _readings()

    def _note(self, name: str) -> None:
        own_accelerator().synchronize()  # or the clock would tell how fast the host asks
        ended = _readings()
        for measure, by_arm in self.seconds_per_step.items():
            by_arm[name].append((ended[measure] - self._began[measure]) / self._size)
        if dist.is_initialized():
            dist.barrier()


def _readings() -> dict[str, float]:
    return {measure: clock() for measure, clock in MEASURES.items()}


BARE = {"1 rank": arms.bare, "ddp": arms.bare_ddp, "fsdp": arms.bare_fsdp}


_KNOWN_TO_FRAMEWORKS = ("cpu", "cuda")


def measure(
    workload: Workload, engine: str, num_rounds: int, directory: str, *, only_bare: bool
) -> Samples:
    """Seconds per step of every arm, by each measure, the warm-up left out."""
    bare = BARE[engine]
    others = {"bare": bare(workload), "bare again": bare(workload)}
    is_known = own_accelerator().device.type in _KNOWN_TO_FRAMEWORKS
    if engine != "fsdp" and is_known and not only_bare:
        others["accelerate"] = arms.accelerate(workload)
        others["fabric"] = arms.fabric(workload)
    return led_by_trainer(
        f"{engine}, {workload.name}",
        workload,
        others,
        num_rounds,
        global_batch_size=workload.batch_size * int(os.environ["WORLD_SIZE"]),
        output_dir=directory,
        parallel={"strategy": "fsdp" if engine == "fsdp" else "ddp"},
    )


def led_by_trainer(
    training: str, workload: Workload, others: dict[str, Run], num_rounds: int, **settings: Any
) -> Samples:
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
    return {
        training + measure: {arm: values[WARM_UP_ROUNDS:] for arm, values in by_arm.items()}
        for measure, by_arm in rounds.seconds_per_step.items()
    }


def main() -> None:
    """`… OUTPUT NUM_ROUNDS [bare]`: rank 0 writes the raw samples as JSON.

    `bare`: only the bare loop beside ours, no other framework.
    """
    output, num_rounds, only_bare = Path(sys.argv[1]), int(sys.argv[2]), "bare" in sys.argv[3:]
    warnings.filterwarnings("ignore")  # the frameworks' own advice on CPUs and loaders
    alone = os.environ["WORLD_SIZE"] == "1"
    torch.set_num_threads(1)  # threads that wait for each other use time which is nobody's
    if not alone:
        meet()
    engines = ("1 rank",) if alone else ("ddp", "fsdp")
    trainings = [(engine, make()) for engine in engines for make in (near_empty, transformer)]
    samples: Samples = {}
    with tempfile.TemporaryDirectory() as directory:
        for engine, workload in trainings:
            samples |= measure(workload, engine, num_rounds, directory, only_bare=only_bare)
    if os.environ["RANK"] == "0":
        output.write_text(json.dumps(samples))
    if not alone:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
