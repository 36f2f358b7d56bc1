"""DealtFeed: a step's micro-batches, dealt anew to whoever is there.

Which samples make up a step follows from the plan alone. How many replicas share them, and which
share is this one's, may change from step to step; a step can also be asked for a second time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch.utils.data import DataLoader, Sampler

from drivetrain.data.batches import BatchPlan, MicroBatch
from drivetrain.data.feed import KeyedDataset, Turn, position_in
from drivetrain.data.reading import Collated
from drivetrain.data.sources import Source


class ElasticFeed:
    """A loader reads ahead for as long as the seat stays the same; a new seat starts a new one."""

    def __init__(self, source: Source, plan: BatchPlan, seed: int) -> None:
        self.plan = plan
        self.steps_done = 0
        """Moved on by the loop: only it knows whether a step counted."""
        self._source = source
        self._seed = seed
        self._total_steps = 0
        self._expected: tuple[int, int, int] | None = None
        self._batches: Iterator[Any] = iter(())

    def state_dict(self) -> dict[str, Any]:
        """Which samples make up a step is computed from its place; ids need not be kept."""
        return self.plan.position(self.steps_done)._asdict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Begin there."""
        self.steps_done = state["step"]
        self.plan = self.plan.going_on_from(position_in(state, self.plan))

    def steps(
        self,
        total_steps: int | None,
        num_epochs: int | None,  # noqa: ARG002 - total_steps is known wherever a length is
    ) -> Iterator[Iterator[Turn]]:
        """One entry per step that is still to be done; the turns come from `deal`."""
        if total_steps is None:
            raise ValueError("a feed that is dealt anew needs to know its steps")
        self._total_steps = total_steps
        while self.steps_done < total_steps:
            yield iter(())

    def deal(self, step: int, num_ranks: int, rank: int) -> Iterator[Turn]:
        """The turns of `rank` among `num_ranks` in `step`; turns without samples are left out."""
        if (step, num_ranks, rank) != self._expected:
            self._batches = self._read_from(step, num_ranks, rank)
        self._expected = (step + 1, num_ranks, rank)
        for micro in own_turns(self.plan, step, rank):
            yield micro, next(self._batches)

    def _read_from(self, step: int, num_ranks: int, rank: int) -> Iterator[Any]:
        self.plan = replace(self.plan, num_ranks=num_ranks)
        loader: DataLoader[Any] = DataLoader(
            KeyedDataset(self._source, self.plan, rank, self._seed),
            batch_sampler=_OrderFrom(self.plan, rank, step, self._total_steps),
            collate_fn=Collated(self._source.collate),
            **self._source.loader_options,
        )
        return iter(loader)


def own_turns(plan: BatchPlan, step: int, rank: int) -> list[MicroBatch]:
    """What `rank` really works on in `step`."""
    return [micro for micro in plan.micro_batches(step, rank) if micro.num_samples]


class _OrderFrom(Sampler[Any]):
    """A rank's micro-batches from one step to the end of the run."""

    def __init__(self, plan: BatchPlan, rank: int, first_step: int, total_steps: int) -> None:
        self._plan, self._rank = plan, rank
        self._steps = range(first_step, total_steps)

    def __len__(self) -> int:
        return sum(len(own_turns(self._plan, step, self._rank)) for step in self._steps)

    def __iter__(self) -> Iterator[Any]:
        for step in self._steps:
            yield from own_turns(self._plan, step, self._rank)
