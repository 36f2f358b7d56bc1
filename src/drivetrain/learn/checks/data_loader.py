"""Sharded data loading: every sample once an epoch, on any number of ranks."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from drivetrain.learn.attempt import Shortcoming, in_this_process, run_on_ranks
from drivetrain.learn.verdict import Passed

_SEED = 3
_SIZES = ((12, 4), (10, 4), (97, 8), (3, 4), (1000, 7))


def check(file: Path) -> Passed:
    in_this_process(file, _judge)
    seen = run_on_ranks(file, _read_an_epoch, 3).results
    _judge_coverage([list(ids) for ids in seen], 100, "an epoch read by 3 ranks")
    return Passed(
        [
            f"{len(_SIZES)} datasets of 3 to 1000 samples on 4 to 8 ranks: each sample once",
            "ranks differ by one sample at most; each epoch has its own order, which is repeatable",
            "3 real ranks read 100 samples in batches: each sample once",
        ]
    )


def _judge(module: ModuleType) -> None:
    for num_samples, num_ranks in _SIZES:
        where = f"{num_samples} samples on {num_ranks} ranks"
        shards = _shards(module, num_samples, 0, num_ranks)
        _judge_coverage(shards, num_samples, where)
        lengths = [len(shard) for shard in shards]
        if max(lengths) - min(lengths) > 1:
            raise Shortcoming(
                "unbalanced",
                "ranks differ by one sample at most",
                f"{lengths} samples",
                where=where,
            )
    _judge_order(module)


def _shards(module: ModuleType, num_samples: int, epoch: int, num_ranks: int) -> list[list[int]]:
    return [
        [int(i) for i in module.rank_indices(num_samples, epoch, _SEED, rank, num_ranks)]
        for rank in range(num_ranks)
    ]


def _judge_coverage(shards: list[list[int]], num_samples: int, where: str) -> None:
    counts = Counter(index for shard in shards for index in shard)
    outside = sorted(index for index in counts if not 0 <= index < num_samples)
    missing = [index for index in range(num_samples) if index not in counts]
    several = sorted(index for index, count in counts.items() if count > 1)
    expected = f"each of the samples 0 to {num_samples - 1} on exactly one rank"
    if outside:
        raise Shortcoming(
            "outside", expected, f"sample {outside[0]}, which does not exist", where=where
        )
    if missing and several:
        ranks = [rank for rank, shard in enumerate(shards) if several[0] in shard]
        found = (
            f"{_some(several)} twice or more (sample {several[0]} on ranks {ranks}),"
            f" {_some(missing)} nowhere"
        )
        raise Shortcoming("different-orders", expected, found, where=where)
    if several:
        ranks = [rank for rank, shard in enumerate(shards) if several[0] in shard]
        found = f"{_some(several)} more than once: sample {several[0]} on ranks {ranks}"
        hint = "same-on-all" if len(several) == num_samples > 1 else "duplicates"
        raise Shortcoming(hint, expected, found, where=where)
    if missing:
        raise Shortcoming("gaps", expected, f"{_some(missing)} on no rank", where=where)


def _some(indices: list[int]) -> str:
    shown = ", ".join(map(str, indices[:4])) + (" …" if len(indices) > 4 else "")
    return f"{len(indices)} sample{'s' if len(indices) > 1 else ''} ({shown})"


def _judge_order(module: ModuleType) -> None:
    first = _shards(module, 1000, 0, 1)[0]
    if first == sorted(first):
        raise Shortcoming(
            "not-shuffled", "a shuffled order", "samples 0, 1, 2 … in their original order"
        )
    if first != _shards(module, 1000, 0, 1)[0]:
        raise Shortcoming(
            "not-repeatable",
            "the same arguments give the same order, so that a run can be repeated and resumed",
            "two calls with the same arguments gave different orders",
        )
    if first == _shards(module, 1000, 1, 1)[0]:
        raise Shortcoming(
            "same-every-epoch",
            "a different order in each epoch",
            "epochs 0 and 1 have the same order",
        )
    if _overlap(module) > 0.5:
        raise Shortcoming(
            "same-samples-every-epoch",
            "the whole dataset is shuffled before it is split among the ranks",
            "rank 0 has the same samples in epochs 0 and 1, only in a different order",
        )


def _overlap(module: ModuleType) -> float:
    epochs = [set(_shards(module, 1000, epoch, 4)[0]) for epoch in (0, 1)]
    return len(epochs[0] & epochs[1]) / len(epochs[0])


def _read_an_epoch(module: Any, _: Any) -> list[int]:
    """Read an epoch with torch's own loader, as a training would."""
    indices = module.rank_indices(100, 2, _SEED, dist.get_rank(), dist.get_world_size())
    data = torch.utils.data.TensorDataset(torch.arange(100))
    chosen = torch.utils.data.Subset(data, [int(i) for i in indices])
    loader = torch.utils.data.DataLoader(chosen, batch_size=8)
    return [int(index) for (batch,) in loader for index in batch]
