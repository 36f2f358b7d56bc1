"""Samplers of every kind, over a dataset whose samples are their own numbers."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler, WeightedRandomSampler

NUM_IDS = 120
IS_RARE = torch.arange(NUM_IDS) % 10 == 0
"""One in ten samples is of the rare class."""


class Ids(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return NUM_IDS

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


def balanced(generator: torch.Generator | None = None) -> WeightedRandomSampler:
    """Both classes equally often."""
    weights = torch.where(IS_RARE, 1 / IS_RARE.sum(), 1 / (~IS_RARE).sum())
    return WeightedRandomSampler(weights.tolist(), NUM_IDS, generator=generator)


class RepeatedAugmentation(Sampler[int]):
    """Three draws of a third of the samples, side by side."""

    def __iter__(self) -> Iterator[int]:
        chosen = torch.randperm(NUM_IDS)[: NUM_IDS // 3]
        return iter(chosen.repeat_interleave(3).tolist())

    def __len__(self) -> int:
        return NUM_IDS


class LengthBuckets(Sampler[list[int]]):
    """Batches of samples of about one length, in random order; the last is shorter."""

    def __iter__(self) -> Iterator[list[int]]:
        by_length = sorted(range(NUM_IDS - 1), key=lambda number: (number * 7) % 31)
        batches = [by_length[start : start + 2] for start in range(0, NUM_IDS - 1, 2)]
        random.shuffle(batches)
        yield from batches

    def __len__(self) -> int:
        return NUM_IDS // 2


class Curriculum(Sampler[int]):
    """A generator of its own, which follows the epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.epoch)
        return iter(torch.randperm(NUM_IDS, generator=generator)[: NUM_IDS // 2].tolist())

    def __len__(self) -> int:
        return NUM_IDS // 2


class OwnGenerator(Sampler[int]):
    """Draws from a generator that goes on from epoch to epoch."""

    def __init__(self) -> None:
        self.numbers = np.random.default_rng(0)

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers.permutation(NUM_IDS).tolist())

    def __len__(self) -> int:
        return NUM_IDS


class OfThisRank(Sampler[int]):
    """What a sampler for plain DDP does."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(int(os.environ.get("RANK", "0")) % 2, NUM_IDS, 2))

    def __len__(self) -> int:
        return NUM_IDS // 2


class OfThisRankLater(OfThisRank):
    """The same, from its second epoch on."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        rank = int(os.environ.get("RANK", "0")) % 2 if self.epoch else 0
        return iter(range(rank, NUM_IDS, 2))


class LongerThanItSays(Curriculum):
    def __len__(self) -> int:
        return NUM_IDS // 2 - 1


class WithoutLength(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(NUM_IDS))


@dataclass(frozen=True)
class Kind:
    name: str
    make: Callable[[], Any]
    refused: str = ""
    """A part of the sentence."""


def _of(sampler: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: DataLoader(Ids(), 4, sampler=sampler())


def _of_batches(sampler: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: DataLoader(Ids(), batch_sampler=sampler())


def _own_seed() -> Any:
    return balanced(torch.Generator().manual_seed(0))


KINDS = [
    Kind("`WeightedRandomSampler`, classes balanced", _of(balanced)),
    Kind("repeated augmentation", _of(RepeatedAugmentation)),
    Kind("length buckets (a batch sampler)", _of_batches(LengthBuckets)),
    Kind(
        "`BatchSampler(WeightedRandomSampler)`",
        _of_batches(lambda: BatchSampler(balanced(), 2, False)),
    ),
    Kind("own sampler, seeded by `set_epoch`", _of(Curriculum)),
    Kind("`WeightedRandomSampler(generator=…)`", _of(_own_seed), "do not follow the run's seed"),
    Kind("own sampler, own generator", _of(OwnGenerator), "do not follow the run's seed"),
]
RANK_KINDS = [
    Kind(
        "own sampler that yields this rank's part",
        _of(OfThisRank),
        "draws different ids in epoch 0",
    ),
    Kind(
        "the same, from its second epoch on", _of(OfThisRankLater), "draws different ids in epoch 1"
    ),
]
"""Refused where there are several ranks."""
