"""Feeds: step by step, a rank's micro-batches with their samples.

    for turns in feed.steps(100, None):       # one entry per optimizer step
        for micro, batch in turns:            # this rank's turns in it, always the same number

`MapFeed` serves datasets with a length, `sampled_feed.SampledFeed` those with a sampler of the
user's, `stream.StreamFeed` those without a length.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from torch.utils.data import DataLoader, Dataset, Sampler

from drivetrain.data.batches import BatchPlan, DataPosition, MicroBatch
from drivetrain.data.keys import DATA, fold, turn_seed
from drivetrain.data.rank_sample_ids import RankSampleIds
from drivetrain.data.reading import Collated, read
from drivetrain.data.seeding import seed_data
from drivetrain.data.sources import Source

Turn = tuple[MicroBatch, Any]


class Feed(Protocol):
    """A rank's share of the training data."""

    plan: BatchPlan

    def steps(self, total_steps: int | None, num_epochs: int | None) -> Iterator[Iterator[Turn]]:
        """One iterator of turns per step, until the steps or the epochs are through."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Where the data stands, after the steps that were taken. The same at any world size."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let steps() resume there."""
        ...

    def sample_ids(self, step: int) -> list[int]:
        """The samples this rank has in a step; empty for a stream, which has no ids."""
        ...


class MapFeed:
    """A dataset with a length: torch's DataLoader reads it, the plan says what."""

    def __init__(self, source: Source, plan: BatchPlan, rank: int, seed: int) -> None:
        self.plan = plan
        self._source = source
        self._rank = rank
        self._seed = seed
        self._step = 0

    def state_dict(self) -> dict[str, Any]:
        """Which samples make up a step is computed from its place; ids need not be kept."""
        return self.plan.position(self._step)._asdict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Begin there."""
        self._step = state["step"]
        self.plan = self.plan.going_on_from(position_in(state, self.plan))

    def sample_ids(self, step: int) -> list[int]:
        """By the plan; turns without samples have none."""
        ids = RankSampleIds(self.plan, self._rank, self._seed, shuffle=self._source.shuffle)
        turns = self.plan.micro_batches(step, self._rank)
        return [i for turn in turns if turn.num_samples for i in ids.ids(turn)]

    def steps(self, total_steps: int | None, num_epochs: int | None) -> Iterator[Iterator[Turn]]:
        """One loader for the whole run: its workers are started once."""
        if total_steps is None:
            if num_epochs is None:
                raise ValueError("either total_steps or num_epochs is needed")
            total_steps = self.plan.end_of(num_epochs - 1)
        order = self._order(range(self._step, total_steps))
        loader: DataLoader[Any] = DataLoader(
            self._keyed(),
            batch_sampler=order,
            collate_fn=Collated(self._source.collate),
            **self._source.loader_options,
        )
        turns = order.pair_with(loader)
        while self._step < total_steps:
            self._step += 1
            yield itertools.islice(turns, self.plan.accumulation)

    def _order(self, steps: range) -> PlannedOrder:
        return PlannedOrder(self.plan, self._rank, steps)

    def _keyed(self) -> KeyedDataset:
        return KeyedDataset(self._source, self.plan, self._rank, self._seed)


def position_in(state: dict[str, Any], plan: BatchPlan) -> DataPosition:
    """Where a saved feed stood; the oldest checkpoints only say after which step."""
    return DataPosition(**{**plan.position(state["step"])._asdict(), **state})


class PlannedOrder(Sampler[list[int]]):
    """Hands the loader whole micro-batches: what to read and under which key."""

    def __init__(self, plan: BatchPlan, rank: int, steps: range) -> None:
        self._plan = plan
        self._rank = rank
        self._steps = steps
        self._asked_for: deque[MicroBatch] = deque()

    def __len__(self) -> int:
        return len(self._steps) * self._plan.accumulation

    def __iter__(self) -> Iterator[Any]:
        for step in self._steps:
            for micro in self._plan.micro_batches(step, self._rank):
                self._asked_for.append(micro)
                yield micro

    def pair_with(self, batches: Iterable[Any]) -> Iterator[Turn]:
        """Each batch with what the loader was asked for: batches come in that order."""
        for batch in batches:
            yield self._asked_for.popleft(), batch


class KeyedDataset(Dataset[Any]):
    """Reads a micro-batch's samples under random streams keyed by (seed, step, index)."""

    def __init__(self, source: Source, plan: BatchPlan, rank: int, seed: int) -> None:
        self._dataset = source.dataset
        self._stream = fold(seed, DATA)
        self._draws = not source.draws_nothing
        self._ids = RankSampleIds(plan, rank, seed, shuffle=source.shuffle)

    def __getitems__(self, micro: MicroBatch) -> list[Any]:
        self._seed(micro)
        return read(self._dataset, self._ids.ids(micro))

    def _seed(self, micro: MicroBatch) -> None:
        if self._draws:
            seed_data(turn_seed(self._stream, micro.step, micro.index))
