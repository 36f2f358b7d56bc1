"""Neighbours: every rank sends a few numbers to the next rank and gets those of the previous one.

If no rank differs from the previous one, all are equal. An exchange is one message sent and one
received, at any number of ranks, and is asynchronous.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist

from drivetrain.parallel.world import World

_tags = itertools.count(4_711)
"""Tags not used by the script; each ring has one, as all ranks create the same rings."""


class Neighbours:
    """A ring of all ranks; those that work on the same samples are adjacent."""

    def __init__(self, world: World, num_numbers: int) -> None:
        order = sorted(
            range(world.layout.world_size), key=lambda rank: (world.layout.dp_index(rank), rank)
        )
        place = order.index(world.rank)
        self.before, self._after = order[place - 1], order[(place + 1) % len(order)]
        self._group = world.host_group
        self._tag = next(_tags)
        self._num_numbers = num_numbers
        self._under_way: tuple[Any, Any, torch.Tensor, torch.Tensor] | None = None

    @staticmethod
    def of(world: World, num_numbers: int) -> Neighbours | None:
        """Return a ring, or None if there is no other rank."""
        return None if world.mesh is None else Neighbours(world, num_numbers)

    def tell(self, numbers: list[int]) -> None:
        """Start sending and receiving. Every rank must call it equally often."""
        sent = torch.tensor(numbers, dtype=torch.int64)
        if len(sent) != self._num_numbers:
            raise ValueError(f"{len(sent)} numbers, not {self._num_numbers}")
        heard = sent.clone()  # a rehearsal receives nothing, and assumes equal ranks
        receiving = dist.irecv(heard, self.before, group=self._group, tag=self._tag)
        sending = dist.isend(sent, self._after, group=self._group, tag=self._tag)
        self._under_way = (receiving, sending, sent, heard)

    def hear(self) -> list[int] | None:
        """Wait for and return the previous rank's numbers; None if no exchange is pending."""
        if self._under_way is None:
            return None
        receiving, sending, _, heard = self._under_way
        self._under_way = None
        for work in (receiving, sending):
            if work is not None:
                work.wait()
        numbers: list[int] = heard.tolist()
        return numbers
