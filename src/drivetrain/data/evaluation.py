"""EvaluationFeed: every validation sample exactly once, in batches that no world size changes.

Batch j has the same samples at any world size; rank r of n takes batches r, r + n, r + 2n … (of a
sharded stream, all of its own part). With `in_lockstep`, every rank gets the same number of
batches, and surplus ones are marked as not counting.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch.utils.data import DataLoader

from drivetrain.core.errors import ConfigError, Problem
from drivetrain.data.batches import share
from drivetrain.data.digest import Mark, Read, ReadDigest
from drivetrain.data.rank_check import RankCheck
from drivetrain.data.reading import Collated, ReadDataset, in_order
from drivetrain.data.ready_batches import num_samples_in
from drivetrain.data.samplers import Drawn
from drivetrain.data.sources import Source
from drivetrain.data.stream_shards import Shards


class EvaluationBatch(NamedTuple):
    """A batch, and the number of its samples that count."""

    batch: Any
    num_samples: int


class _Chunk(NamedTuple):
    """A stream's next samples."""

    make: Callable[[], Any]
    """Collates the samples."""
    size: int
    read: Read


class EvaluationFeed:
    """A rank's share of the validation data."""

    def __init__(
        self,
        source: Source,
        batch_size: int,
        rank: int,
        num_ranks: int,
        max_samples: int | None = None,
        drawn: Drawn | None = None,
        shards: Shards | None = None,
        check: RankCheck | None = None,
    ) -> None:
        """Create a feed. `drawn`: ids from the user's sampler; default: all samples, in order."""
        self._shards, self._check = shards, check
        self._most = max_samples
        self.length = source.length if drawn is None else drawn.num_ids
        """Length of the whole set, even if `max_samples` limits what is read."""
        self._batches = (
            None if source.length is None else _batches(source, batch_size, drawn, max_samples)
        )
        self._source = source
        self._batch_size = batch_size
        self._rank = rank
        self._num_ranks = num_ranks

    @property
    def is_sharded(self) -> bool:
        """True if each rank reads its own part; the parts have no common order."""
        return self._shards is not None

    def batches(self, *, in_lockstep: bool) -> Iterator[EvaluationBatch]:
        """Yield this rank's batches; with `in_lockstep`, as many as the rank with the most."""
        if self._batches is None:
            if self._shards is not None:
                yield from self._from_shard(self._shards, in_lockstep=in_lockstep)
            else:
                yield from self._from_stream(in_lockstep=in_lockstep)
            return
        own = [list(ids) for ids in self._batches[self._rank :: self._num_ranks]]
        rounds = -(-len(self._batches) // self._num_ranks)
        ids = [*own, [self._batches[0][0]]] if in_lockstep and len(own) < rounds else own
        loader: DataLoader[Any] = DataLoader(
            ReadDataset(self._source.dataset),
            batch_sampler=ids,
            collate_fn=Collated(self._source.collate),
            **self._source.loader_options,
        )
        for turn, batch in enumerate(loader):
            yield EvaluationBatch(batch, len(ids[turn]) if turn < len(own) else 0)

    def _from_stream(self, *, in_lockstep: bool) -> Iterator[EvaluationBatch]:
        """Read the whole stream on every rank; ranks compare it after each round of batches."""
        chunks = self._chunks(in_order(self._source.dataset), self._most)
        while True:
            own = first = None
            for place, chunk in enumerate(itertools.islice(chunks, self._num_ranks)):
                first = chunk if place == 0 else first
                own = chunk if place == self._rank and chunk.size else own
                last = chunk.read
            if first is None:
                return
            if self._check is not None:
                self._check.note(0, last.after, last)
            if own is not None:
                yield EvaluationBatch(own.make(), own.size)
            elif in_lockstep and first.size:
                yield EvaluationBatch(first.make(), 0)

    def _from_shard(self, shards: Shards, *, in_lockstep: bool) -> Iterator[EvaluationBatch]:
        """Read this rank's own part; in lockstep, a finished rank yields batches without weight."""
        part = shards.part(self._source.dataset, self._num_ranks, self._rank)
        most = self._most
        if most is not None:
            low, high = share(most, self._num_ranks, self._rank)
            most = high - low
        first: _Chunk | None = None
        for chunk in self._chunks(in_order(part), most):
            if self._check is not None and first is None:
                self._check.note(0, chunk.read.after, chunk.read)
            first = first or chunk
            if not chunk.size:
                break
            if in_lockstep:
                shards.sum_over_ranks(chunk.size)
            yield EvaluationBatch(chunk.make(), chunk.size)
        while in_lockstep and shards.sum_over_ranks(0):
            if first is None or not first.size:
                rule, remedy = f"rank {self._rank}'s shard of it is empty", "use fewer ranks"
                raise ConfigError([Problem("val", rule, remedy, has_value=False)])
            yield EvaluationBatch(first.make(), 0)

    def _chunks(self, items: Iterator[Any], most: int | None) -> Iterator[_Chunk]:
        """Yield chunks of a batch's size, at most `most` samples in all; the last one is empty."""
        if self._check is not None:
            self._check.begin_epoch()
        digest, collate = ReadDigest(Mark()), Collated(self._source.collate)
        is_batched, left = self._source.is_batched, math.inf if most is None else most
        items = digest.follow(items)
        while True:
            count = 1 if is_batched else self._batch_size
            chunk = list(itertools.islice(items, int(min(count, left))))
            size = sum(map(num_samples_in, chunk)) if is_batched else len(chunk)
            if size > left:  # a ready batch is not split
                chunk, size = [], 0
            left -= size
            read = digest.take()
            if not chunk:
                read = read._replace(before=read.after)
            samples = chunk[0] if is_batched and chunk else chunk
            yield _Chunk(partial(collate, samples), size, read)
            if not chunk:
                return


def _batches(
    source: Source, batch_size: int, drawn: Drawn | None, most: int | None
) -> Sequence[Sequence[Any]]:
    """Return the ids of every batch of a dataset with a length."""
    if drawn is not None and source.sampler is not None and source.sampler.yields_batches:
        return _first_ids(drawn.items, most)
    ids: Sequence[Any] = range(source.length or 0) if drawn is None else drawn.items
    end = len(ids) if most is None else min(len(ids), most)
    return [ids[start : min(start + batch_size, end)] for start in range(0, end, batch_size)]


def _first_ids(batches: Sequence[list[Any]], most: int | None) -> Sequence[list[Any]]:
    left = sum(map(len, batches)) if most is None else most
    kept = []
    for batch in batches:
        if left > 0:
            kept.append(batch[:left])
            left -= len(kept[-1])
    return kept
