"""Values that do travel: small real tensors, between the ranks that are rehearsed.

Most collectives of a rehearsal carry fake tensors, of which only the shape is known. A few carry
values that decide what happens next: the shape a stage hands on, whether losses count tokens. Those
are exchanged through a store, and ranks that are not rehearsed are taken to say what the first of
the group that is says.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any
from zlib import crc32

import torch
from torch._C._distributed_c10d import Store

from drivetrain.rehearse.calls import Call


class NotTogether(Exception):
    """A rank of the group does something else, or never comes."""


@dataclass(frozen=True)
class _Letter:
    call: Call
    values: tuple[torch.Tensor, ...]


class Mailbox:
    """One rank's; every rehearsed rank of a group must come to the same exchange."""

    def __init__(self, store: Store, rank: int, rehearsed: Sequence[int], timeout_s: float) -> None:
        self._store = store
        self._rank = rank
        self._rehearsed = frozenset(rehearsed)
        self._timeout = timedelta(seconds=timeout_s)
        self._turns: Counter[tuple[int, ...]] = Counter()

    def exchange(self, call: Call, values: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """What each rank of the group has given, in the group's order."""
        turn = self._turns[call.ranks]
        self._turns[call.ranks] += 1
        group = f"{crc32(repr(call.ranks).encode())}/{turn}"
        letter = _Letter(call, tuple(value.detach().clone() for value in values))
        self._store.set(f"{group}/{self._rank}", pickle.dumps(letter).hex())
        present = [rank for rank in call.ranks if rank in self._rehearsed]
        letters = {rank: self._read(group, rank, call) for rank in present}
        first = letters[present[0]]
        return [list(letters.get(rank, first).values) for rank in call.ranks]

    def send(self, call: Call, values: Sequence[torch.Tensor]) -> None:
        """To one other rank, which may read it later."""
        letter = _Letter(call, tuple(value.detach().clone() for value in values))
        key = f"{self._next(self._rank, call.peer)}/{self._rank}"
        self._store.set(key, pickle.dumps(letter).hex())

    def receive(self, call: Call) -> list[torch.Tensor] | None:
        """From one other rank; None when that is not rehearsed."""
        if call.peer is None or call.peer not in self._rehearsed:
            return None
        pair = self._next(call.peer, self._rank)
        return list(self._read(pair, call.peer, replace(call, name="send")).values)

    def _next(self, sender: int | None, receiver: int | None) -> str:
        pair = (-1, sender or 0, receiver or 0)
        self._turns[pair] += 1
        return f"{pair[1]}-{pair[2]}/{self._turns[pair]}"

    def _read(self, group: str, rank: int, call: Call) -> _Letter:
        key = f"{group}/{rank}"
        try:
            self._store.wait([key], self._timeout)
        except Exception as error:
            raise NotTogether(f"rank {rank} never came to {call.name}") from error
        # written a moment ago by another rank of this rehearsal
        letter: Any = pickle.loads(bytes.fromhex(self._store.get(key).decode()))  # noqa: S301
        if letter.call.shape != call.shape:
            raise NotTogether(f"rank {rank} came to {letter.call.name}, not to {call.name}")
        return _Letter(letter.call, letter.values)
