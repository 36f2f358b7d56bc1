"""One rank of `python -m benchmarks stream`: at every third step ranks compare what they read."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset

from benchmarks.steps.device import own_accelerator
from benchmarks.steps.interleaved import WARM_UP_ROUNDS, run_rank
from benchmarks.steps.workloads import Workload, near_empty, transformer
from drivetrain.data.stream import StreamFeed
from drivetrain.train.hooks import Hook
from drivetrain.train.task import Task
from drivetrain.train.trainer import Trainer

_ARMS = ("compared", "not", "not again")
"""By the step's number, modulo 3."""
_STEPS_PER_ROUND = 3


class _Endless(IterableDataset[tuple[torch.Tensor, ...]]):
    """A data set's samples in order, as often as they are asked for."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[tuple[torch.Tensor, ...]]:
        while True:
            yield from (self.dataset[index] for index in range(len(self.dataset)))


class _Clock(Hook):
    """From the end of a step to the end of the next: reading is in it, and comparing."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {arm: [] for arm in _ARMS}
        self._ended_s = 0.0
        self._check: Any = None

    def on_fit_start(self, trainer: Trainer) -> None:
        self._check = self._feed(trainer)._check  # noqa: SLF001 - what is measured

    def on_train_batch_end(self, trainer: Trainer, step: int) -> None:
        own_accelerator().synchronize()
        now_s = time.perf_counter()
        self.seconds[_ARMS[step % 3]].append(now_s - self._ended_s)
        self._feed(trainer)._check = None if (step + 1) % 3 else self._check  # noqa: SLF001 - as above
        self._ended_s = time.perf_counter()

    @staticmethod
    def _feed(trainer: Trainer) -> StreamFeed:
        assert trainer.assembly is not None  # noqa: S101 - for mypy
        feed = trainer.assembly.feed
        assert isinstance(feed, StreamFeed)  # noqa: S101 - as above
        return feed


def measure(num_rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of each step, by arm, round by round."""
    return {
        f"ddp, {workload.name}": _measure(workload, num_rounds)
        for workload in (near_empty(), transformer())
    }


def _measure(workload: Workload, num_rounds: int) -> dict[str, list[float]]:
    clock, rounds = _Clock(), num_rounds + WARM_UP_ROUNDS
    with tempfile.TemporaryDirectory() as directory:
        config = {
            "global_batch_size": workload.batch_size * dist.get_world_size(),
            "micro_batch_size": workload.batch_size,
            "max_steps": _STEPS_PER_ROUND * rounds,
            "output_dir": directory,
            "checkpoint": {"every_steps": None},
            "record": {"progress": "none", "sinks": []},
            "sentinel": {"every_steps": None},
        }
        task = Task(model=workload.model, loss=workload.loss)
        Trainer(task, config, [clock]).fit(_Endless(workload.dataset()))
    return {arm: each[WARM_UP_ROUNDS:] for arm, each in clock.seconds.items()}


def main() -> None:
    """Samples of steps."""
    run_rank(measure)


if __name__ == "__main__":
    main()
