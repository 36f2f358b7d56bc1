"""RankSampleIds: the sample ids of one rank's own micro-batches.

Ids are computed for many steps at a time, because a call for thousands of ids costs little more
than one for ten. The work grows with the rank's own share, not with the global batch.
"""

from __future__ import annotations

import torch

from drivetrain.data.batches import BatchPlan, MicroBatch
from drivetrain.data.permutation import Order

_STRETCH = 8192


class RankSampleIds:
    """Computes ids ahead along the plan; any micro-batch of the rank may be asked for."""

    def __init__(self, plan: BatchPlan, rank: int, seed: int, *, shuffle: bool) -> None:
        self._plan = plan
        self._rank = rank
        self._seed = seed
        self._shuffle = shuffle
        own = len(plan.block(rank)) * plan.micro_batch_size
        self._steps_ahead = max(1, _STRETCH // max(own, 1))
        self._ids: dict[tuple[int, int], list[int]] = {}
        """Ids by a turn's start and stop."""
        self._epoch = -1

    def ids(self, micro: MicroBatch) -> list[int]:
        """Return a micro-batch's sample ids; a turn without samples gets its batch's first ids."""
        if not self._shuffle:
            return list(range(micro.start, self._plan.stop_of(micro)))
        if micro.epoch != self._epoch or (micro.start, micro.stop) not in self._ids:
            self._look_ahead(micro)
        return self._ids[micro.start, micro.stop]

    def _look_ahead(self, micro: MicroBatch) -> None:
        if self._plan.length is None:
            raise ValueError("a stream has no ids")
        end = min(micro.step + self._steps_ahead, self._plan.end_of(micro.epoch))
        turns = [
            turn
            for step in range(micro.step, end)
            for turn in self._plan.micro_batches(step, self._rank)
        ]
        ranges = [torch.arange(turn.start, self._plan.stop_of(turn)) for turn in turns]
        order = Order(self._plan.length, self._seed, micro.epoch)
        ids = order.ids(torch.cat(ranges)).split([len(r) for r in ranges])
        self._epoch = micro.epoch
        self._ids = {
            (turn.start, turn.stop): part.tolist() for turn, part in zip(turns, ids, strict=True)
        }
