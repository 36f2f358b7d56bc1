"""ElasticFeed: assigns a step's micro-batches to the replicas that are present in that step.

The plan alone determines which samples make up a step. The number of replicas that share them, and
this replica's share, may change from step to step. A step can also be read a second time.
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
    """A feed whose loader prefetches while this replica's rank and the number of ranks stay.

    A change of either starts a new loader.
    """

    def __init__(self, source: Source, plan: BatchPlan, seed: int) -> None:
        self.plan = plan
        self.steps_done = 0
        """Advanced by the training loop, which alone knows whether a step counted."""
        self._source = source
        self._seed = seed
        self._total_steps = 0
        self._expected: tuple[int, int, int] | None = None
        self._batches: Iterator[Any] = iter(())

    def state_dict(self) -> dict[str, Any]:
        """Return the position; a step's samples are computed from it, so no ids are saved."""
        return self.plan.position(self.steps_done)._asdict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume at a saved position."""
        self.steps_done = state["step"]
        self.plan = self.plan.going_on_from(position_in(state, self.plan))

    def steps(
        self,
        total_steps: int | None,
        num_epochs: int | None,  # noqa: ARG002 - total_steps is known wherever a length is
    ) -> Iterator[Iterator[Turn]]:
        """Yield one empty entry per remaining step; the turns come from `deal`."""
        if total_steps is None:
            raise ValueError("an elastic feed needs to know its number of steps")
        self._total_steps = total_steps
        while self.steps_done < total_steps:
            yield iter(())

    def deal(self, step: int, num_ranks: int, rank: int) -> Iterator[Turn]:
        """Yield the turns of `rank` among `num_ranks` in `step`, without those that are empty."""
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
    """Return the micro-batches of `rank` in `step` that have samples."""
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
