"""Shards of a stream: parts that only one rank reads, made by the dataset or with `shard()`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from drivetrain.core.errors import ConfigError, Problem
from drivetrain.data.rank_check import splits_by


def part_of(dataset: Any, sharding: str, num_shards: int, index: int) -> Any:
    """Return the part of a dataset that a rank reads."""
    if sharding == "already_sharded":
        return dataset
    return dataset.shard(num_shards=num_shards, index=index)


@dataclass(frozen=True)
class Shards:
    """How a stream is sharded over ranks."""

    name: str
    """own_shard: by the dataset's shard(). already_sharded: it yields each rank its own part."""
    sum_over_ranks: Callable[[int], int]
    """Sums a number over ranks; a step's size is known only that way."""

    @property
    def are_given(self) -> bool:
        """True if the dataset itself is already sharded."""
        return self.name == "already_sharded"

    def part(self, dataset: Any, num_shards: int, index: int) -> Any:
        """Return the part of a dataset that a rank reads."""
        return part_of(dataset, self.name, num_shards, index)


def reads_shards(dataset: Any, sharding: str) -> bool:
    """True if each rank reads its own part.

    A stream without `shard()` has no parts: a rank would have to read all of it and skip the other
    ranks' samples. same_stream does exactly that, with the results of one process.
    """
    if sharding == "own_shard" and splits_by(dataset):
        rule = (
            f"the stream was split by {splits_by(dataset)}; a shard of a shard leaves out samples"
        )
        remedy = "use already_sharded, or pass it unsplit"
        raise ConfigError([Problem("data.iterable_sharding", rule, remedy, sharding)])
    return sharding == "already_sharded" or (sharding == "own_shard" and hasattr(dataset, "shard"))
