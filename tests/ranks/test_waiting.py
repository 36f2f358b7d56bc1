"""Whose fault is a slow step? Each rank's own time, before it waits for the others."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from drivetrain.record.reading import duration_s, open_run, own_s
from drivetrain.testing import run_ranks
from drivetrain.train.keep_loop import prepare
from drivetrain.train.task import Task
from drivetrain.train.trainer import Trainer
from tests.ranks.small_task import samples, small_task

SLEEP_S, NUM_STEPS = 0.1, 12


def train(output_dir: str, slow_rank: int | None, **changes: Any) -> str:
    """One rank sleeps in its forward; the others can only wait for it."""
    task = small_task(width=8)
    rank = torch.distributed.get_rank()

    def loss(model: torch.nn.Module, batch: Any) -> Any:
        if rank == slow_rank:
            time.sleep(SLEEP_S / 2)  # two micro-batches a step
        return task.loss(model, batch)

    config = {
        "global_batch_size": 12,
        "micro_batch_size": 3,
        "max_steps": NUM_STEPS,
        "output_dir": output_dir,
        "checkpoint": {"every_steps": None},
        "record": {"progress": "none", "sinks": []},
        **changes,
    }
    return str(Trainer(Task(task.model, loss), config).fit(samples()).run_dir)


LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp": {"parallel": {"strategy": "fsdp"}},
    "bitwise": {"reproducibility": "bitwise"},
    "local_sgd": {"parallel": {"strategy": "local_sgd", "local_sgd": {"inner_steps": 1}}},
}


def train_layouts(output_dir: str) -> tuple[dict[str, str], tuple[list[float], list[float]]]:
    """All of them in one world: ranks are started once."""
    runs = {name: train(output_dir, 1, **changes) for name, changes in LAYOUTS.items()}
    return runs, watched_and_not(output_dir)


@pytest.mark.slow
def test_the_slow_rank_is_known_by_its_own_time(tmp_path: Path) -> None:
    (runs, losses), _ = run_ranks(train_layouts, 2, args=(str(tmp_path),), timeout_s=500)
    for name, run_dir in runs.items():
        fast, slow = (open_run(run_dir).steps(rank)[2:] for rank in (0, 1))
        # differences: a busy machine slows down both
        assert np.median(own_s(slow)) - np.median(own_s(fast)) > SLEEP_S / 2, name
        waited_s = [np.median(each["communication_s"]) for each in (fast, slow)]
        assert waited_s[0] - waited_s[1] > SLEEP_S / 2, name
        # the wall clock says nothing: both are equally slow
        assert np.median(duration_s(fast)) == pytest.approx(np.median(duration_s(slow)), rel=0.2)
    assert losses[0] == losses[1], "watching has changed a number"


def watched_and_not(output_dir: str) -> tuple[list[float], list[float]]:
    """The same training with and without an eye on its gradients."""
    losses = []
    for watches in (True, False):
        config = {
            "global_batch_size": 12,
            "micro_batch_size": 3,
            "max_steps": 5,
            "output_dir": output_dir,
            "record": {"progress": "none", "sinks": []},
        }
        task = small_task(width=8)
        loop = prepare(task.model, None, samples(), config)
        if not watches:
            loop.assembly.engine.waiting.stop_watching()
        for step in loop.steps():
            for batch in step:
                loop.backward(task.loss(loop.model, batch))
            loop.step()
        losses.append(loop.history.losses)
    return losses[0], losses[1]


def kept_of_an_evaluation(output_dir: str) -> int:
    """fsdp gathers weights for each batch of an evaluation, too, which may have a million."""
    task = small_task(width=8)
    config = {
        "global_batch_size": 12,
        "micro_batch_size": 3,
        "max_steps": 1,
        "output_dir": output_dir,
        "parallel": {"strategy": "fsdp"},
        "checkpoint": {"every_steps": None},
        "record": {"progress": "none", "sinks": []},
    }
    loop = prepare(task.model, None, samples(), config)
    for step in loop.steps():
        for batch in step:
            loop.backward(task.loss(loop.model, batch))
        loop.step()
        loop.evaluate(samples(), task.evaluate)
    return len(loop.assembly.engine.waiting.take())


def test_nothing_is_kept_of_the_waiting_between_steps(tmp_path: Path) -> None:
    assert run_ranks(kept_of_an_evaluation, 2, 500, (str(tmp_path),)) == [0, 0]
