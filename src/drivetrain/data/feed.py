"""Feeds: yield a rank's micro-batches with their samples, step by step.

    for turns in feed.steps(100, None):       # one entry per optimizer step
        for micro, batch in turns:            # this rank's turns in it, always the same number

`MapFeed` is for datasets with a length, `sampled_feed.SampledFeed` for those with the user's own
sampler, `stream.StreamFeed` for those without a length.
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
        """Yield one iterator of turns per step, until the steps or the epochs end."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data after the steps so far. The same at any world size."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make steps() resume at a saved position."""
        ...

    def sample_ids(self, step: int) -> list[int]:
        """Return the ids of this rank's samples in a step; empty for a stream, which has none."""
        ...


class MapFeed:
    """Feed of a dataset with a length: torch's DataLoader reads what the plan selects."""

    def __init__(self, source: Source, plan: BatchPlan, rank: int, seed: int) -> None:
        self.plan = plan
        self._source = source
        self._rank = rank
        self._seed = seed
        self._step = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the position; a step's samples are computed from it, so no ids are saved."""
        return self.plan.position(self._step)._asdict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume at a saved position."""
        self._step = state["step"]
        self.plan = self.plan.going_on_from(position_in(state, self.plan))

    def sample_ids(self, step: int) -> list[int]:
        """Return the ids from the plan; turns without samples have none."""
        ids = RankSampleIds(self.plan, self._rank, self._seed, shuffle=self._source.shuffle)
        turns = self.plan.micro_batches(step, self._rank)
        return [i for turn in turns if turn.num_samples for i in ids.ids(turn)]

    def steps(self, total_steps: int | None, num_epochs: int | None) -> Iterator[Iterator[Turn]]:
        """Yield each step's turns; one loader serves the whole run, so workers start once."""
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
    """Return a saved feed's position; the oldest checkpoints contain only the step."""
    return DataPosition(**{**plan.position(state["step"])._asdict(), **state})


class PlannedOrder(Sampler[list[int]]):
    """Gives the loader whole micro-batches: what to read, and the key of its random stream."""

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
        """Pair each batch with its micro-batch; the loader keeps the order of requests."""
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
