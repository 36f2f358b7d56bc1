"""EvaluationFeed: every validation sample exactly once, in batches that no world size changes.

Batch j holds the same samples everywhere; rank r takes batches r, r + n, r + 2n … With
`in_lockstep` every rank gets the same number of turns, the surplus ones marked as not counting.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch.utils.data import DataLoader

from drivetrain.data.reading import Collated, ReadDataset, in_order
from drivetrain.data.sources import Source


class EvaluationBatch(NamedTuple):
    """Some samples, and how many of them count."""

    batch: Any
    num_samples: int


class EvaluationFeed:
    """A rank's share of the validation data."""

    def __init__(
        self,
        source: Source,
        batch_size: int,
        rank: int,
        num_ranks: int,
        max_samples: int | None = None,
    ) -> None:
        self.length = source.length
        """Of all there is, also where only a part is read."""
        self._most = max_samples
        self._source = source
        self._batch_size = batch_size
        self._rank = rank
        self._num_ranks = num_ranks

    def batches(self, *, in_lockstep: bool) -> Iterator[EvaluationBatch]:
        """This rank's batches; with `in_lockstep` as many as the rank that has most."""
        if self.length is None:
            yield from self._from_stream(in_lockstep=in_lockstep)
            return
        end = self.length if self._most is None else min(self.length, self._most)
        starts = range(0, end, self._batch_size)
        own = list(starts[self._rank :: self._num_ranks])
        rounds = -(-len(starts) // self._num_ranks)
        ids = [list(range(start, min(start + self._batch_size, end))) for start in own]
        if in_lockstep and len(own) < rounds:
            ids.append([0])
        loader: DataLoader[Any] = DataLoader(
            ReadDataset(self._source.dataset),
            batch_sampler=ids,
            collate_fn=Collated(self._source.collate),
            **self._source.loader_options,
        )
        for turn, batch in enumerate(loader):
            yield EvaluationBatch(batch, len(ids[turn]) if turn < len(own) else 0)

    def _from_stream(self, *, in_lockstep: bool) -> Iterator[EvaluationBatch]:
        samples = itertools.islice(in_order(self._source.dataset), self._most)
        collate = Collated(self._source.collate)
        first: list[Any] = []
        for turn in itertools.count():
            chunk = list(itertools.islice(samples, self._batch_size))
            first = first or chunk[:1]
            if chunk and turn % self._num_ranks == self._rank:
                yield EvaluationBatch(collate(chunk), len(chunk))
            if not chunk:
                # ranks from turn % n on have had one turn less in this round
                unfinished = turn % self._num_ranks
                if in_lockstep and first and unfinished and self._rank >= unfinished:
                    yield EvaluationBatch(collate(first), 0)
                return
