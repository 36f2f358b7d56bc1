"""Data that can only be read in order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from drivetrain.core.errors import ConfigError
from drivetrain.testing import run_ranks
from drivetrain.train.trainer import Trainer
from tests.gpt_task import Sentences, collate, gpt_task
from tests.ranks.training import assert_same_training, settings

CONSTANT = {"learning_rate": 3e-3, "max_grad_norm": 1.0}


class Stream(IterableDataset[torch.Tensor]):
    def __init__(self, length: int = 101) -> None:
        self.length = length

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (Sentences(self.length)[i] for i in range(self.length))


class Uneven(Stream):
    """Rank 0's shard is three times as long as the others'."""

    def shard(self, num_shards: int, index: int) -> Iterator[torch.Tensor]:
        numbers = range(60) if index == 0 else range(60, 80)
        return (Sentences(80)[i] for i in numbers)


def train_stream(output_dir: str, **data: Any) -> tuple[list[float], list[int]]:
    config = settings(
        output_dir, max_steps=None, num_train_epochs=2, data=data, optimization=CONSTANT
    )
    trainer = Trainer(gpt_task(), config)
    history = trainer.fit(DataLoader(Stream(), collate_fn=collate, batch_size=1))
    return history.losses, [metrics.num_samples for metrics in history.steps]


def train_stream_with_workers(output_dir: str) -> tuple[list[float], list[int]]:
    return train_stream(output_dir, num_workers=2)


@pytest.mark.slow
@pytest.mark.long
def test_a_stream_gives_the_same_numbers_at_any_world_size(tmp_path: Path) -> None:
    losses, sizes = train_stream(str(tmp_path))
    assert sizes == [24, 24, 24, 24, 5] * 2
    for world_size in (2, 3):
        for theirs, their_sizes in run_ranks(train_stream, world_size, 120, args=(str(tmp_path),)):
            assert their_sizes == sizes
            assert_same_training(theirs, losses)
    for theirs, _ in run_ranks(train_stream_with_workers, 2, 120, args=(str(tmp_path),)):
        assert_same_training(theirs, losses)


def train_own_shards(output_dir: str) -> list[int]:
    config = settings(
        output_dir,
        max_steps=None,
        num_train_epochs=2,
        optimization=CONSTANT,
        data={"iterable_sharding": "own_shard"},
    )
    trainer = Trainer(gpt_task(), config)
    history = trainer.fit(DataLoader(Uneven(), collate_fn=collate, batch_size=1))
    return [metrics.num_samples for metrics in history.steps]


def test_ranks_agree_on_uneven_ends(tmp_path: Path) -> None:
    for sizes in run_ranks(train_own_shards, 2, 60, args=(str(tmp_path),)):
        assert sizes == [24, 20, 12, 12, 12] * 2


def test_a_stream_that_is_used_up_is_said_to_be(tmp_path: Path) -> None:
    trainer = Trainer(gpt_task(), settings(str(tmp_path), max_steps=50))
    once = iter([Sentences(4)[i] for i in range(4)])
    loader: Any = DataLoader(_Once(once), collate_fn=collate, batch_size=1)
    with pytest.raises(ConfigError, match="the stream has no samples in epoch 1"):
        trainer.fit(loader)


class _Once(IterableDataset[torch.Tensor]):
    def __init__(self, samples: Iterator[torch.Tensor]) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[torch.Tensor]:
        return self.samples
