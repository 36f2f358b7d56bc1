"""One rank of `python -m benchmarks replay`: every third step is computed twice."""

from __future__ import annotations

import tempfile
import time

import torch.distributed as dist

from benchmarks.steps.device import own_accelerator
from benchmarks.steps.interleaved import WARM_UP_ROUNDS, run_rank
from benchmarks.steps.workloads import transformer
from drivetrain.train.hooks import Hook
from drivetrain.train.task import Task
from drivetrain.train.trainer import Trainer

_ARMS = ("checked", "plain", "plain again")
"""By the step's number, modulo 3."""


class _Clock(Hook):
    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {arm: [] for arm in _ARMS}
        self._began_s = 0.0

    def on_train_batch_start(self, trainer: Trainer, step: int) -> None:  # noqa: ARG002
        own_accelerator().synchronize()
        self._began_s = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, step: int) -> None:  # noqa: ARG002
        own_accelerator().synchronize()
        self.seconds[_ARMS[step % 3]].append(time.perf_counter() - self._began_s)


def measure(num_rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of each step, by arm, round by round. One micro-batch a step: the dearest case."""
    workload, clock = transformer(), _Clock()
    rounds = num_rounds + WARM_UP_ROUNDS
    with tempfile.TemporaryDirectory() as directory:
        config = {
            "global_batch_size": workload.batch_size * dist.get_world_size(),
            "micro_batch_size": workload.batch_size,
            "max_steps": 3 * rounds,
            "output_dir": directory,
            "checkpoint": {"every_steps": None},
            "record": {"progress": "none", "sinks": []},
            "sentinel": {"every_steps": None, "replay_every_steps": 3},
        }
        task = Task(model=workload.model, loss=workload.loss)
        Trainer(task, config, [clock]).fit(workload.dataset())
    return {"ddp, transformer": {arm: each[WARM_UP_ROUNDS:] for arm, each in clock.seconds.items()}}


def main() -> None:
    """Samples of steps."""
    run_rank(measure)


if __name__ == "__main__":
    main()
