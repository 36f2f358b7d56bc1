"""Evaluation: every sample once, and the single process's value to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from drivetrain.testing import run_ranks
from drivetrain.train.evaluate import ExactMean
from drivetrain.train.history import EvaluationResult
from drivetrain.train.task import Task
from drivetrain.train.trainer import Trainer
from tests.gpt_task import Sentences, collate, gpt_task
from tests.ranks.training import NUM_VAL, sentences, settings


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Any:
        return (Sentences(NUM_VAL)[i] for i in range(NUM_VAL))


def evaluate_untrained(output_dir: str) -> list[EvaluationResult]:
    """One step with a vanishing learning rate: the same weights, to the bit, on any world."""
    results = []
    for strategy in ("ddp", "fsdp"):
        for data in (Sentences(NUM_VAL), Stream()):
            config = settings(
                output_dir,
                max_steps=1,
                optimization={"learning_rate": 1e-30},
                parallel={"strategy": strategy},
            )
            trainer = Trainer(gpt_task(), config)
            history = trainer.fit(sentences(), DataLoader(data, collate_fn=collate))
            results.append(history.evaluations[-1])
    return results


@pytest.mark.slow
def test_metrics_equal_the_single_process_exactly(tmp_path: Path) -> None:
    (alone, *others) = evaluate_untrained(str(tmp_path))
    assert alone.num_samples == NUM_VAL
    assert set(alone.metrics) == {"loss", "accuracy"}
    assert all(other == alone for other in others)
    for world_size in (2, 3, 4):
        for results in run_ranks(evaluate_untrained, world_size, 120, args=(str(tmp_path),)):
            assert results == [alone] * 4


def evaluate_with_batch_norm(output_dir: str) -> dict[str, float]:
    data = TensorDataset(torch.randn(40, 4, generator=torch.Generator().manual_seed(0)))
    task = Task(
        model=lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),
        loss=lambda model, batch: model(batch[0]).square().mean(),
    )
    # 5 micro-batches on 3 ranks: the last rank has a turn without samples
    config = settings(output_dir, global_batch_size=20, micro_batch_size=4, max_steps=6)
    return dict(Trainer(task, config).fit(data, data).evaluations[-1].metrics)


def test_running_statistics_are_rank_0s_everywhere(tmp_path: Path) -> None:
    first, *others = run_ranks(evaluate_with_batch_norm, 3, 60, args=(str(tmp_path),))
    assert first["loss"] > 0
    assert all(other == first for other in others)


def test_the_sum_is_exact_whatever_the_order() -> None:
    forwards, backwards = ExactMean(), ExactMean()
    values = [1e16, 1.0, -1e16, 3.0]
    for value in values:
        forwards.add(value, 1)
    for value in reversed(values):
        backwards.add(value, 1)
    assert forwards.value() == backwards.value() == 1.0


def test_a_value_that_is_no_number_is_not_hidden() -> None:
    mean = ExactMean()
    mean.add(1.0, 1)
    mean.add(float("nan"), 1)
    assert mean.value() != mean.value()
