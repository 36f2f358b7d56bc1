"""Readers of a stream, which run in the rank's process or in its loader processes.

`WholeReader` reads everything and keeps this rank's micro-batches; `ShardReader` reads only this
rank's part. Each batch, and the end of the stream, comes with a record of what was read for it
(`digest.Read`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset

from drivetrain.core.errors import ConfigError
from drivetrain.data.batches import BatchPlan, MicroBatch
from drivetrain.data.digest import Mark, Read, ReadDigest
from drivetrain.data.keys import DATA, fold, turn_seed
from drivetrain.data.reading import Collated, in_order
from drivetrain.data.ready_batches import check_sizes, num_samples_in
from drivetrain.data.seeding import seed_data
from drivetrain.data.sources import Source
from drivetrain.data.stream_shards import part_of
from drivetrain.data.worker_split import WatchedWorkers, hide_workers


class Piece(NamedTuple):
    """What a reader yields: a micro-batch, or the stream's end."""

    micro: MicroBatch
    batch: Any
    read: Read


class Place(NamedTuple):
    """Where a reader starts."""

    epoch: int
    began: int
    """The step at which the epoch, or its batches of this size, started."""
    used: int
    """Samples of the epoch before that."""
    skipped: int
    """Completed steps, which are read and dropped."""
    mark: Mark
    """Position of the dataset when reading starts."""


class WholeReader(IterableDataset[Piece | ConfigError]):
    """Reads everything and keeps this rank's micro-batches."""

    def __init__(self, source: Source, plan: BatchPlan, rank: int, seed: int, place: Place) -> None:
        self._source = source
        self._plan = plan
        self._rank = rank
        self._key = fold(seed, DATA)
        self._place = place
        self._collate = Collated(source.collate)
        self.hashes_next = False
        """Whether every sample of the next batch is hashed."""

    @property
    def num_items(self) -> int:
        """Number of the stream's items that are read at a time."""
        plan = self._plan
        return plan.num_micro_batches if self._source.is_batched else plan.global_batch_size

    def __iter__(self) -> Iterator[Piece | ConfigError]:
        try:
            yield from self._pieces()
        except ConfigError as error:  # from a loader process, torch would raise another type
            yield error

    def _pieces(self) -> Iterator[Piece]:
        # The stream must not split itself among workers: each worker reads all of it.
        worker, num_workers = hide_workers()
        # The loader takes from its workers round-robin: a worker makes every num_workers-th turn.
        turn = 0
        for step, chunk, digest in self._chunks():
            read = digest.take()
            for micro, samples in self._cut(step, chunk):
                if turn % num_workers == worker:
                    seed_data(turn_seed(self._key, step, micro.index))
                    yield Piece(micro, self._batch(samples), read)
                turn += 1

    def _samples(self) -> Iterator[Any]:
        return in_order(self._source.dataset)

    def _chunks(self) -> Iterator[tuple[int, list[Any], ReadDigest]]:
        """Yield `num_items` at a time, with random streams keyed by step; the last is empty."""
        place, dataset = self._place, self._source.dataset
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(place.epoch)
        digest = ReadDigest(place.mark)
        seed_data(turn_seed(self._key, place.began, -1))
        items = digest.follow(self._samples())
        for _ in itertools.islice(items, place.used):
            pass
        for done in itertools.count():
            step = place.began + done
            if done:
                seed_data(turn_seed(self._key, step, -1))
            if done == place.skipped:
                digest.take()
            digest.hashes_all, self.hashes_next = self.hashes_next, False
            chunk = list(itertools.islice(items, self.num_items))
            if not chunk:
                digest.take()
            if not chunk or done >= place.skipped:
                yield step, chunk, digest
            if not chunk:
                return

    def _cut(self, step: int, chunk: list[Any]) -> list[tuple[MicroBatch, Any]]:
        """Return this rank's turns; turns without samples if nothing is left."""
        plan, epoch = self._plan, self._place.epoch
        if not chunk:
            return [(MicroBatch(step, -1, 0, 0, 0, epoch), None)] * plan.accumulation
        if not self._source.is_batched:
            whole = MicroBatch(step, -1, 0, 0, len(chunk), epoch)
            turns = plan.cut(whole, self._rank)
            return [(micro, chunk[micro.start : plan.stop_of(micro)]) for micro in turns]
        return self._cut_ready(step, chunk)

    def _cut_ready(self, step: int, chunk: list[Any]) -> list[tuple[MicroBatch, Any]]:
        plan, epoch = self._plan, self._place.epoch
        sizes = [num_samples_in(batch) for batch in chunk]
        is_first = step == self._place.began + self._place.skipped
        check_sizes(sizes, plan.micro_batch_size, is_first=is_first)
        starts = [0, *itertools.accumulate(sizes)]
        turns: list[tuple[MicroBatch, Any]] = []
        for index in plan.block(self._rank):
            if index < len(chunk):
                low, high = starts[index : index + 2]
                turns.append((MicroBatch(step, index, low, high, sum(sizes), epoch), chunk[index]))
        idle = (MicroBatch(step, -1, 0, 0, sum(sizes), epoch), chunk[0])
        return turns + [idle] * (plan.accumulation - len(turns))

    def _batch(self, samples: Any) -> Any:
        if samples is None:
            return None
        return self._collate(samples)


class ShardReader(WholeReader):
    """Reads only this rank's part; ranks agree on the step's true size later."""

    def __init__(
        self,
        source: Source,
        plan: BatchPlan,
        rank: int,
        seed: int,
        place: Place,
        sharding: str,
    ) -> None:
        super().__init__(source, plan, rank, seed, place)
        self._sharding = sharding

    @property
    def num_items(self) -> int:
        """Number of items in a micro-batch, which are read at a time."""
        return 1 if self._source.is_batched else self._plan.micro_batch_size

    def _pieces(self) -> Iterator[Piece]:
        workers = WatchedWorkers()
        splits_itself = False
        for turn, (step, chunk, digest) in enumerate(self._chunks()):
            if turn == 0:
                splits_itself = workers.splits_itself()
            read = digest.take(workers.id if splits_itself else None)
            if splits_itself or not chunk or turn % workers.num_workers == workers.id:
                size = self._size(chunk, is_first=turn == 0)
                seed_data(turn_seed(self._key, step, turn))
                micro = MicroBatch(step, -1, 0, size, size, self._place.epoch)
                samples = chunk[0] if self._source.is_batched and chunk else chunk or None
                yield Piece(micro, self._batch(samples), read)

    def _size(self, chunk: list[Any], *, is_first: bool) -> int:
        if not chunk or not self._source.is_batched:
            return len(chunk)
        sizes = [num_samples_in(chunk[0])]
        check_sizes(sizes, self._plan.micro_batch_size, is_first=is_first)
        return sizes[0]

    def _samples(self) -> Iterator[Any]:
        num_ranks = self._plan.num_ranks
        return in_order(part_of(self._source.dataset, self._sharding, num_ranks, self._rank))
