"""StreamFeed: samples that can only be read in order.

`same_stream`: every rank reads the whole stream, cuts it into global batches and keeps its own
micro-batches, so the numbers are those of one process. `own_shard`: a rank reads only its own part
(the dataset's `shard()`, or every n-th sample); ranks agree on each step's true size, and one whose
part has ended keeps step, with weight zero, until all have ended.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data._utils import worker as worker_module

from drivetrain.core.errors import ConfigError, Problem
from drivetrain.data.batches import BatchPlan, MicroBatch
from drivetrain.data.feed import Turn
from drivetrain.data.keys import DATA, fold, turn_seed
from drivetrain.data.reading import Collated, in_order
from drivetrain.data.seeding import seed_data
from drivetrain.data.sources import Source

SumOverRanks = Callable[[int], int]


class StreamFeed:
    """A rank's share of a stream."""

    def __init__(
        self,
        source: Source,
        plan: BatchPlan,
        rank: int,
        seed: int,
        sum_over_ranks: SumOverRanks | None = None,
    ) -> None:
        self.plan = plan
        self._source = source
        self._rank = rank
        self._seed = seed
        self._sum = sum_over_ranks
        """Given for own_shard, where only the ranks together know a step's size."""
        self._epoch_now, self._step, self._epoch_began_at = 0, 0, 0
        self._used = 0
        """Samples of the epoch that came before `_epoch_began_at`, in batches of another size."""
        self._is_over = False
        self._dataset_state: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """The place in the epoch; after a short batch it is over, and the next has begun."""
        return {
            "step": self._step,
            "epoch": self._epoch_now + self._is_over,
            "epoch_began_at": self._step if self._is_over else self._epoch_began_at,
            "used": 0 if self._is_over else self._used,
            "global_batch_size": self.plan.global_batch_size,
            "num_shards": None if self._sum is None else self.plan.num_ranks,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let steps() go on from there."""
        shards = None if self._sum is None else self.plan.num_ranks
        if state["num_shards"] != shards:
            raise ConfigError(
                [
                    Problem(
                        "data.iterable_sharding",
                        f"shards of {state['num_shards']} ranks cannot be resumed by {shards}",
                        "use as many ranks as before, or same_stream from the start",
                        "own_shard",
                    )
                ]
            )
        self._step, self._epoch_now = state["step"], state["epoch"]
        self._epoch_began_at, self._used = state["epoch_began_at"], state.get("used", 0)
        size = state.get("global_batch_size", self.plan.global_batch_size)
        if size != self.plan.global_batch_size:
            self._go_on_with_another_size(size)

    def _go_on_with_another_size(self, before: int) -> None:
        """Count on in samples: batches of the new size begin where the last of the old ended."""
        if self._sum is not None:
            raise ConfigError(
                [
                    Problem(
                        "global_batch_size",
                        f"was {before}; where shards of a stream stand is counted in batches",
                        "keep it, or use data.iterable_sharding=same_stream from the start",
                        self.plan.global_batch_size,
                    )
                ]
            )
        self._used += (self._step - self._epoch_began_at) * before
        self._epoch_began_at = self._step

    def sample_ids(self, step: int) -> list[int]:  # noqa: ARG002
        """A stream's samples have no ids."""
        return []

    @property
    def dataset_state(self) -> dict[str, Any] | None:
        """The dataset's own account of where it stands: then it need not be read up to there.

        None when it gives none, when loader processes have read ahead of the steps, or when only a
        shard of it is read: where that stands, the dataset does not know.
        """
        dataset, own_shard = self._source.dataset, self._sum is not None
        if own_shard or self._source.num_workers or not hasattr(dataset, "load_state_dict"):
            return None
        state: dict[str, Any] = dataset.state_dict()
        return state

    @dataset_state.setter
    def dataset_state(self, state: dict[str, Any] | None) -> None:
        self._dataset_state = state

    def steps(self, total_steps: int | None, num_epochs: int | None) -> Iterator[Iterator[Turn]]:
        """Epoch after epoch, until the steps or the epochs are through."""
        # without a number of steps the epochs end the run; with one, epochs go on as needed
        limit = num_epochs if total_steps is None else None
        for epoch in itertools.count(self._epoch_now):
            if epoch == limit or self._step == total_steps:
                return
            if epoch > self._epoch_now:
                self._epoch_now, self._epoch_began_at, self._used = epoch, self._step, 0
            rest = self._rest_of_epoch()
            while self._step != total_steps:  # asked first: what is read ahead would be lost
                turns = next(rest, None)
                if turns is None:
                    break
                self._step += 1
                whole = turns[0][0].batch_samples
                self._is_over = self._sum is None and whole < self.plan.global_batch_size
                yield iter(turns)
            if self._step == self._epoch_began_at and not self._used:
                raise ConfigError(
                    [
                        Problem(
                            "data",
                            f"the stream has no samples in epoch {epoch}",
                            "give it at least one, or pass a dataset that can be read again",
                            has_value=False,
                        )
                    ]
                )

    def _rest_of_epoch(self) -> Iterator[list[Turn]]:
        """From where the run stands: by the dataset's own state, or by reading up to it."""
        state, self._dataset_state = self._dataset_state, None
        if state is not None:
            self._source.dataset.load_state_dict(state)
            yield from self._epoch(self._step, 0)
            return
        done = self._step - self._epoch_began_at
        yield from itertools.islice(self._epoch(self._epoch_began_at, self._used), done, None)

    def _epoch(self, step: int, skip: int) -> Iterator[list[Turn]]:
        reader = (
            SameStream(self._source, self.plan, self._rank, self._seed)
            if self._sum is None
            else OwnShard(self._source, self.plan, self._rank, self._seed)
        )
        reader.begin(self._epoch_now, step, skip)
        loader: DataLoader[Any] = DataLoader(
            reader, batch_size=None, collate_fn=_as_is, **self._source.loader_options
        )
        turns = iter(loader)
        if self._sum is None:
            while group := list(itertools.islice(turns, self.plan.accumulation)):
                yield group
        else:
            yield from self._agreed(turns, self._sum)

    def _agreed(self, turns: Iterator[Turn], sum_over_ranks: SumOverRanks) -> Iterator[list[Turn]]:
        last: list[Turn] = []
        while True:
            group = list(itertools.islice(turns, self.plan.accumulation))
            total = sum_over_ranks(sum(micro.num_samples for micro, _ in group))
            if total == 0:
                return
            if not group:
                if not last:
                    raise ConfigError(
                        [
                            Problem(
                                "data.iterable_sharding",
                                f"rank {self._rank}'s shard of the stream is empty",
                                "use same_stream, or fewer ranks",
                                "own_shard",
                            )
                        ]
                    )
                group = [(micro._replace(start=0, stop=0), batch) for micro, batch in last]
            last = group
            yield [(micro._replace(batch_samples=total), batch) for micro, batch in group]


def _as_is(item: Any) -> Any:
    return item


class SameStream(IterableDataset[Turn]):
    """Reads everything, keeps this rank's micro-batches."""

    def __init__(self, source: Source, plan: BatchPlan, rank: int, seed: int) -> None:
        self._source = source
        self._plan = plan
        self._rank = rank
        self._key = fold(seed, DATA)
        self._epoch = 0
        self._step = 0
        self._skip = 0

    def begin(self, epoch: int, step: int, skip: int) -> None:
        """Where the next iteration starts counting, after `skip` samples that were used."""
        self._epoch, self._step, self._skip = epoch, step, skip

    def __iter__(self) -> Iterator[Turn]:
        worker = get_worker_info()
        worker_id, num_workers = (worker.id, worker.num_workers) if worker else (0, 1)
        # The stream must not split itself among workers as well: each reads all of it.
        worker_module._worker_info = None  # noqa: SLF001
        # The loader takes from its workers in turn: worker w makes every num_workers-th turn.
        for turn, (micro, samples) in enumerate(self._turns()):
            if turn % num_workers == worker_id:
                seed_data(turn_seed(self._key, micro.step, micro.index))
                yield micro, Collated(self._source.collate)(samples)

    def _samples(self) -> Iterator[Any]:
        return in_order(self._source.dataset)

    def _turns(self) -> Iterator[tuple[MicroBatch, list[Any]]]:
        for whole, chunk in self._batches(self._plan.global_batch_size):
            for micro in self._plan.cut(whole, self._rank):
                yield micro, chunk[micro.start : self._plan.stop_of(micro)]

    def _batches(self, size: int) -> Iterator[tuple[MicroBatch, list[Any]]]:
        """`size` samples at a time, read under random streams keyed by the step."""
        step = self._step
        if hasattr(self._source.dataset, "set_epoch"):
            self._source.dataset.set_epoch(self._epoch)
        seed_data(turn_seed(self._key, step, -1))
        samples = itertools.islice(self._samples(), self._skip, None)
        while chunk := list(itertools.islice(samples, size)):
            yield MicroBatch(step, -1, 0, 0, len(chunk), self._epoch), chunk
            step += 1
            seed_data(turn_seed(self._key, step, -1))


class OwnShard(SameStream):
    """Reads this rank's part only; a step's true size is agreed on later."""

    def _samples(self) -> Iterator[Any]:
        dataset, num_ranks = self._source.dataset, self._plan.num_ranks
        if hasattr(dataset, "shard"):
            return in_order(dataset.shard(num_shards=num_ranks, index=self._rank))
        return itertools.islice(super()._samples(), self._rank, None, num_ranks)

    def _turns(self) -> Iterator[tuple[MicroBatch, list[Any]]]:
        own = len(self._plan.block(self._rank)) * self._plan.micro_batch_size
        alone = BatchPlan(own, self._plan.micro_batch_size, 1, None)
        first_index = self._plan.block(self._rank).start
        for whole, chunk in self._batches(own):
            for micro in alone.cut(whole, 0):
                samples = chunk[micro.start : alone.stop_of(micro)]
                yield micro._replace(index=first_index + micro.index), samples
