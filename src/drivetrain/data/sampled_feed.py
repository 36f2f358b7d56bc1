"""SampledFeed: a dataset with a length, in the order of the user's own sampler.

The sampler is iterated once per epoch, in the rank's own process, and gives the same ids on every
rank (`samplers.py`); they are split into steps like any dataset's. A batch sampler's batches are
micro-batches: a step takes as many as make up a global batch and weights each by its true size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from drivetrain.core.errors import ConfigError
from drivetrain.data.batches import BatchPlan, MicroBatch
from drivetrain.data.feed import KeyedDataset, MapFeed, PlannedOrder, Turn
from drivetrain.data.reading import read
from drivetrain.data.samplers import Drawn, UserSampler
from drivetrain.data.sources import Source
from drivetrain.parallel.neighbours import Neighbours


class Picked(NamedTuple):
    """A request to a loader process: a micro-batch and its ids."""

    micro: MicroBatch
    ids: list[Any]


class SampledFeed(MapFeed):
    """A `MapFeed` whose ids come from the user's sampler."""

    def __init__(
        self,
        source: Source,
        sampler: UserSampler,
        plan: BatchPlan,
        rank: int,
        seed: int,
        neighbours: Neighbours | None = None,
    ) -> None:
        super().__init__(source, plan, rank, seed)
        self._sampler = sampler
        self._neighbours = neighbours
        self.first = sampler.check_repeatable(seed)
        """The first epoch's ids, which must be the same on all ranks."""
        self._drawn: dict[int, Drawn] = {0: self.first}

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the epoch, and a digest of the epoch's ids."""
        state = super().state_dict()
        drawn = self._drawn.get(state["epoch"])
        is_within = state["samples"] > 0 and drawn is not None
        digest = drawn.digest if is_within and drawn else None
        return {**state, "drawn": digest, "first_drawn": self.first.digest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume at a saved position; ConfigError if the epoch's ids are not the same."""
        state = dict(state)
        digest, first = state.pop("drawn", None), state.pop("first_drawn", None)
        super().load_state_dict(state)
        if first != self.first.digest:  # a different sampler, which the user accepted
            return
        if digest is not None and self.drawn(state["epoch"]).digest != digest:
            raise self._sampler.refusal(
                f"draws different ids in epoch {state['epoch']} than before the run was saved",
                "resume with the sampler, the weights and the data the run was started with",
            )

    def sample_ids(self, step: int) -> list[int]:
        """Return the sampler's ids; none if batches differ in size, which makes ids ambiguous."""
        turns = [picked for picked in self.picked(step) if picked.micro.num_samples]
        sizes = {len(picked.ids) for picked in turns}
        if self._sampler.yields_batches and sizes != {self.plan.micro_batch_size}:
            return []
        return [number for picked in turns for number in picked.ids]

    def steps(self, total_steps: int | None, num_epochs: int | None) -> Iterator[Iterator[Turn]]:
        """Like MapFeed's; at each epoch's first step, ranks compare their ids."""
        told: int | None = None
        for turns in super().steps(total_steps, num_epochs):
            epoch = self.plan.position(self._step - 1).epoch
            if epoch != told:
                told = epoch
                self._compare(self.drawn(epoch))
            yield turns

    def drawn(self, epoch: int) -> Drawn:
        """Return an epoch's ids. Loader processes prefetch, so two epochs may be in use."""
        if epoch not in self._drawn:
            found = self._sampler.draw(self._seed, epoch)
            if self._sampler.yields_batches:
                self._check_size(found)
            kept = {key: value for key, value in self._drawn.items() if key >= epoch - 1}
            self._drawn = {**kept, epoch: found}
        return self._drawn[epoch]

    def check_size(self) -> None:
        """ConfigError unless the first epoch's batches have the size of a micro-batch."""
        if self._sampler.yields_batches:
            self._check_size(self.first)

    def picked(self, step: int) -> list[Picked]:
        """Return this rank's turns in a step, with their ids."""
        if self._sampler.yields_batches:
            return self._picked_batches(step)
        turns = self.plan.micro_batches(step, self._rank)
        items = self.drawn(turns[0].epoch).items
        return [
            Picked(micro, list(items[micro.start : self.plan.stop_of(micro)])) for micro in turns
        ]

    def _picked_batches(self, step: int) -> list[Picked]:
        """Return the turns with true batch sizes; the plan counts every batch as a full one."""
        plan = self.plan
        _, epoch, position = plan.position(step)
        first = position // plan.micro_batch_size
        batches = self.drawn(epoch).items[first : first + plan.num_micro_batches]
        total = sum(map(len, batches))
        start = sum(map(len, self.drawn(epoch).items[:first])) if first else 0
        starts = [start]
        for batch in batches:
            starts.append(starts[-1] + len(batch))
        turns = [
            Picked(
                MicroBatch(step, index, starts[index], starts[index + 1], total, epoch),
                list(batches[index]),
            )
            for index in plan.block(self._rank)
            if index < len(batches)
        ]
        idle = Picked(MicroBatch(step, -1, 0, 0, total, epoch), list(batches[0]))
        return turns + [idle] * (plan.accumulation - len(turns))

    def _order(self, steps: range) -> PlannedOrder:
        return SampledOrder(self, steps)

    def _keyed(self) -> KeyedDataset:
        return PickedDataset(self._source, self.plan, self._rank, self._seed)

    def _check_size(self, drawn: Drawn) -> None:
        largest, size = self._sampler.largest(drawn), self.plan.micro_batch_size
        if largest != size and (drawn.epoch == 0 or largest > size):
            raise self._sampler.refusal(
                f"yields batches of up to {largest} ids, each of which is a micro-batch, but "
                f"micro_batch_size is {size}",
                f"set micro_batch_size={largest}",
            )

    def _compare(self, drawn: Drawn) -> None:
        if self._neighbours is None:
            return
        own = [drawn.epoch, len(drawn.items), drawn.digest]
        self._neighbours.tell(own)
        if self._neighbours.hear() != own:
            raise self.differs(drawn.epoch, self._neighbours.before)

    def differs(self, epoch: int, rank: int) -> ConfigError:
        """Return the error for a rank that has drawn different ids."""
        return self._sampler.refusal(
            f"draws different ids in epoch {epoch} than that of rank {rank}",
            "let it yield the ids of all ranks on every rank, because Drivetrain splits them, and "
            "let it draw from torch's, Python's or NumPy's global generators",
        )


class SampledOrder(PlannedOrder):
    """Gives the loader a rank's micro-batches with their ids."""

    def __init__(self, feed: SampledFeed, steps: range) -> None:
        super().__init__(feed.plan, 0, steps)
        self._feed = feed

    def __iter__(self) -> Iterator[Any]:
        for step in self._steps:
            for picked in self._feed.picked(step):
                self._asked_for.append(picked.micro)
                yield picked


class PickedDataset(KeyedDataset):
    """Reads the requested ids, with random streams keyed by (seed, step, index)."""

    def __getitems__(self, asked: Any) -> list[Any]:
        self._seed(asked.micro)
        return read(self._dataset, asked.ids)
