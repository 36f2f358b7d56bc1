"""Ranks that end a run early do it after the same step, and leave one whole checkpoint of it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import drivetrain
from drivetrain import EarlyStopping, Hook, Task, Total, Trainer
from drivetrain.core.errors import WorkerFailure
from drivetrain.testing import run_ranks
from tests.ranks.small_task import samples, small_task

STEPS = 60
SCORES = {4: 0.5, 8: 0.9, 12: 0.6, 16: 0.7}


def settings(folder: str, strategy: str = "ddp", **more: Any) -> dict[str, Any]:
    return {
        "global_batch_size": 8,
        "max_steps": STEPS,
        "output_dir": folder,
        "parallel": {"strategy": strategy},
        "checkpoint": {"every_steps": 1000, "asynchronous": False},
        "record": {"progress": "none", "sinks": []},
        **more,
    }


class Asks(Hook):
    """One rank alone wants to stop; the ranks ask each other about once a second."""

    def on_before_optimizer_step(self, trainer: Trainer, step: int) -> None:
        time.sleep(3 / STEPS)

    def on_train_batch_end(self, trainer: Trainer, step: int) -> None:
        if dist.get_rank() == 1 and step == 6:
            trainer.stop("rank 1 has seen enough")


def saved(run_dir: Path | None) -> list[int]:
    assert run_dir is not None
    manifests = run_dir.glob("checkpoints/step-*/manifest.json")
    return sorted(json.loads(path.read_text())["step"] for path in manifests)


def stop_by_one(folder: str) -> tuple[int, str, list[int], float]:
    trainer = Trainer(small_task(), settings(folder), [Asks()])
    history = trainer.fit(samples())
    weight = sum(float(p.sum()) for p in trainer.model.parameters())
    return history.steps[-1].step, history.stopped, saved(history.run_dir), weight


def test_one_rank_stops_all_after_the_same_step(tmp_path: Path) -> None:
    first, second = run_ranks(stop_by_one, 2, 120, args=(str(tmp_path),))
    assert first == second
    step, reason, steps, _ = first
    assert 6 <= step < STEPS
    assert (reason, steps) == ("rank 1 has seen enough", [step])


class Scored(Hook):
    def __init__(self) -> None:
        self.step = 0

    def on_validation_start(self, trainer: Trainer, step: int) -> None:
        self.step = step

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        loss = F.cross_entropy(model(batch[0]), batch[1])
        score = torch.tensor(100.0 * SCORES.get(self.step, 0.1))
        return {"loss": loss, "accuracy": Total(score, 100)}


def stop_early(folder: str) -> tuple[int, list[int], bool]:
    best = {"every_steps": 10, "keep_last": 1, "keep_best": "accuracy", "keep_best_mode": "max"}
    config = settings(folder, "fsdp", checkpoint=best, evaluation={"every_steps": 4})
    scored = Scored()
    task = Task(small_task().model, small_task().loss, metrics=scored.metrics)
    stopping = EarlyStopping("accuracy", patience=2, mode="max")
    history = Trainer(task, config, [scored, stopping]).fit(samples(), samples())
    assert history.run_dir is not None
    files = [history.run_dir / "checkpoints" / name for name in ("best.pt", "weights.pt")]
    states = [torch.load(file) for file in files]
    differ = not torch.equal(states[0]["0.weight"], states[1]["0.weight"])
    return history.steps[-1].step, saved(history.run_dir), differ


def test_shards_are_stopped_by_an_evaluation_and_their_best_is_kept(tmp_path: Path) -> None:
    found = run_ranks(stop_early, 2, 120, args=(str(tmp_path),))
    assert found == [(16, [8, 16], True)] * 2


def leave(folder: str, how: str) -> tuple[int, str, list[int]]:
    config = settings(folder, "fsdp")
    loop = drivetrain.prepare(small_task().model, None, samples(), config)
    for number, step in enumerate(loop.steps(), 1):
        for batch in step:
            loop.backward(small_task().loss(loop.model, batch))
        loop.step()
        if number == 7 and how == "break":
            break
        if number == 7 and how == "error" and dist.get_rank() == 1:
            raise ArithmeticError("on one rank alone")
    return loop.history.steps[-1].step, loop.history.stopped, saved(loop.history.run_dir)


def test_ranks_that_leave_their_loops_save_together(tmp_path: Path) -> None:
    expected = (7, "the script left its loop", [7])
    assert run_ranks(leave, 2, 120, args=(str(tmp_path), "break")) == [expected] * 2


def test_a_rank_that_fails_after_its_step_waits_for_nobody(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailure, match="on one rank alone"):
        run_ranks(leave, 2, 60, args=(str(tmp_path), "error"))
