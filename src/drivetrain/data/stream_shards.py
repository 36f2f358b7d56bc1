"""Shards of a stream: parts that ranks read alone, given by the dataset or asked of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from drivetrain.core.errors import ConfigError, Problem
from drivetrain.data.rank_check import splits_by


def part_of(dataset: Any, sharding: str, num_shards: int, index: int) -> Any:
    """What a rank reads."""
    if sharding == "already_sharded":
        return dataset
    return dataset.shard(num_shards=num_shards, index=index)


@dataclass(frozen=True)
class Shards:
    """How the parts of a stream come to the ranks."""

    name: str
    """own_shard: by the dataset's shard(); already_sharded: it yields each rank its own."""
    sum_over_ranks: Callable[[int], int]
    """Only the ranks together know a step's size."""

    @property
    def are_given(self) -> bool:
        """Whether the dataset itself is read."""
        return self.name == "already_sharded"

    def part(self, dataset: Any, num_shards: int, index: int) -> Any:
        """What a rank reads."""
        return part_of(dataset, self.name, num_shards, index)


def reads_shards(dataset: Any, sharding: str) -> bool:
    """Whether each rank reads a part of its own.

    A stream without `shard()` has no parts: a rank would read all of it to skip the others', which
    is what same_stream does, with the numbers of one process.
    """
    if sharding == "own_shard" and splits_by(dataset):
        rule = (
            f"the stream was split by {splits_by(dataset)}; a shard of a shard leaves out samples"
        )
        remedy = "use already_sharded, or pass it unsplit"
        raise ConfigError([Problem("data.iterable_sharding", rule, remedy, sharding)])
    return sharding == "already_sharded" or (sharding == "own_shard" and hasattr(dataset, "shard"))
