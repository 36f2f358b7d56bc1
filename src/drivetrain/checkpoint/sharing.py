"""Decide which rank writes a piece that several ranks hold, without gathering all plans on one.

torch's own planner gathers every rank's plan on one: ranks × tensors objects in one process. Here
each piece has a home: the rank that the hash of its name selects. Each rank tells the homes which
pieces it holds, and a home answers which other ranks hold them. The ranks that hold the same set of
pieces then divide the set by the same deterministic rule. What a rank sends, receives and keeps is
proportional to the pieces it holds. The result is reused until some rank holds other pieces.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

Numbers = NDArray[np.int64]
_WORDS = 2
"""64-bit words per key, enough that no two pieces share a key."""


@dataclass(frozen=True)
class Held:
    """A piece that this rank holds."""

    name: str
    offsets: tuple[int, ...]
    num_bytes: int


def keys_of(held: Sequence[Held]) -> Numbers:
    """Return one key (a row of integers) per piece, the same on every rank that holds it."""
    digests = b"".join(
        hashlib.blake2b(repr((each.name, each.offsets)).encode(), digest_size=8 * _WORDS).digest()
        for each in held
    )
    return np.frombuffer(digests, np.int64).reshape(-1, _WORDS)


def homes_of(keys: Numbers, num_ranks: int) -> Numbers:
    """Return the home rank of each key."""
    homes: Numbers = (keys[:, 0].view(np.uint64) % np.uint64(num_ranks)).astype(np.int64)
    return homes


def answers(keys: Numbers, askers: Numbers) -> Numbers:
    """Return per asker: its index among the holders, their number, and an id of their set."""
    if not len(keys):
        return np.zeros((0, 3), np.int64)
    order = np.lexsort((askers, *keys.T))
    ordered = keys[order]
    is_first = np.r_[True, (ordered[1:] != ordered[:-1]).any(1)]
    starts = np.flatnonzero(is_first)
    group = np.cumsum(is_first) - 1
    counts = np.diff(np.r_[starts, len(keys)])
    sets = np.add.reduceat(_mixed(askers[order]), starts)
    found = np.empty((len(keys), 3), np.int64)
    place = np.arange(len(keys)) - starts[group]
    found[order] = np.stack((place, counts[group], sets[group].view(np.int64)), 1)
    return found


def own_share(held: Sequence[Held], keys: Numbers, said: Numbers) -> list[bool]:
    """Return which of its pieces a rank writes; bytes are balanced over the holders of a set."""
    mine = [True] * len(held)
    sets: dict[tuple[int, int], list[int]] = {}
    for index, (_, count, which) in enumerate(said.tolist()):
        if count > 1:
            sets.setdefault((count, which), []).append(index)
    for (count, _), members in sets.items():
        loads = [(0, place) for place in range(count)]
        for index in sorted(members, key=lambda i: (-held[i].num_bytes, *keys[i].tolist())):
            load, place = heapq.heappop(loads)
            mine[index] = place == int(said[index, 0])
            heapq.heappush(loads, (load + max(1, held[index].num_bytes), place))
    return mine


def _mixed(ranks: Numbers) -> NDArray[np.uint64]:
    """Return hashes of ranks whose sums identify sets of ranks."""
    value = ranks.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        value = (value ^ (value >> np.uint64(shift))) * np.uint64(factor)
    return value ^ (value >> np.uint64(31))


class Sharing:
    """Determines which of its pieces a rank writes; the result is cached between saves."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._known: tuple[bytes, list[bool]] | None = None
        self.num_settled = 0
        """How often the shares were computed."""

    def of(self, held: Sequence[Held]) -> list[bool]:
        """Return for each piece whether this rank writes it. A collective call."""
        if self._group is None:
            return [True] * len(held)
        keys = keys_of(held)
        digest = hashlib.blake2b(keys.tobytes()).digest()
        is_known = torch.tensor(int(self._known is not None and self._known[0] == digest))
        dist.all_reduce(is_known, dist.ReduceOp.MIN, group=self._group)
        if self._known is None or not is_known:
            self._known = digest, self._settle(held, keys, self._group)
            self.num_settled += 1
        return self._known[1]

    def _settle(self, held: Sequence[Held], keys: Numbers, group: dist.ProcessGroup) -> list[bool]:
        num_ranks = dist.get_world_size(group)
        homes = homes_of(keys, num_ranks)
        order = np.argsort(homes, kind="stable")
        sent = np.bincount(homes, minlength=num_ranks)
        asked, got = _exchange(keys[order], sent, group)
        said, _ = _exchange(answers(asked, np.repeat(np.arange(num_ranks), got)), got, group)
        found = np.empty_like(said)
        found[order] = said
        return own_share(held, keys, found)


def _exchange(rows: Numbers, counts: Numbers, group: dist.ProcessGroup) -> tuple[Numbers, Numbers]:
    """Send `counts` rows to each rank; return the received rows and their number per rank."""
    got = torch.empty(len(counts), dtype=torch.int64)
    dist.all_to_all_single(got, torch.from_numpy(counts.astype(np.int64)), group=group)
    width = rows.shape[1]
    into = torch.empty((int(got.sum()), width), dtype=torch.int64)
    from_rows = torch.from_numpy(np.ascontiguousarray(rows))
    dist.all_to_all_single(into, from_rows, got.tolist(), counts.tolist(), group=group)
    numbers: Any = into.numpy()
    return numbers, got.numpy()


# Byte strings of any length between the ranks of a group.


def send_to_first(data: bytes, group: dist.ProcessGroup) -> None:
    """Send to the group's rank 0, which receives from one rank after the other."""
    first = dist.get_global_rank(group, 0)
    dist.send(torch.tensor(len(data)), first, group=group)
    dist.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), first, group=group)


def receive_from(rank: int, group: dist.ProcessGroup) -> bytes:
    """Receive from a rank of the group."""
    source = dist.get_global_rank(group, rank)
    length = torch.tensor(0)
    dist.recv(length, source, group=group)
    data = torch.empty(int(length), dtype=torch.uint8)
    dist.recv(data, source, group=group)
    return data.numpy().tobytes()


def hear_first(data: bytes, group: dist.ProcessGroup) -> bytes:
    """Broadcast the bytes of the group's rank 0, and return them on every rank."""
    first = dist.get_global_rank(group, 0)
    length = torch.tensor(len(data))
    dist.broadcast(length, first, group=group)
    is_first = dist.get_rank(group) == 0
    text = torch.frombuffer(bytearray(data + b" "), dtype=torch.uint8)
    if not is_first:
        text = torch.empty(int(length) + 1, dtype=torch.uint8)
    dist.broadcast(text, first, group=group)
    return text[:-1].numpy().tobytes()
