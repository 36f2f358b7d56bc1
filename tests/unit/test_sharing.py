"""Who writes which piece: every one once, the work spread evenly, and nobody knows it all."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch.distributed as dist

from drivetrain.checkpoint.sharing import (
    Held,
    Sharing,
    answers,
    hear_first,
    homes_of,
    keys_of,
    own_share,
    receive_from,
    send_to_first,
)
from drivetrain.testing import run_ranks

MB = 10**6


def settled(everyones: Sequence[Sequence[Held]]) -> list[list[Held]]:
    """What each rank writes, with every home asked in turn."""
    num_ranks = len(everyones)
    keys = [keys_of(held) for held in everyones]
    homes = [homes_of(each, num_ranks) for each in keys]
    said = [np.zeros((len(each), 3), np.int64) for each in keys]
    for home in range(num_ranks):
        there = [np.flatnonzero(each == home) for each in homes]
        asked = np.concatenate([each[at] for each, at in zip(keys, there, strict=True)])
        askers = np.repeat(np.arange(num_ranks), [len(at) for at in there])
        told = np.split(answers(asked, askers), np.cumsum([len(at) for at in there])[:-1])
        for rank, at in enumerate(there):
            said[rank][at] = told[rank]
    return [
        [piece for piece, is_mine in zip(held, own_share(held, *both), strict=True) if is_mine]
        for held, *both in zip(everyones, keys, said, strict=True)
    ]


def pieces(names: str, size: int = MB, offset: int = 0) -> list[Held]:
    return [Held(name, (offset, 0), size) for name in names.split()]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7])
def test_what_all_hold_is_written_once_and_evenly(num_ranks: int) -> None:
    model = [Held(f"w{n}", (0,), (1 + n % 5) * MB) for n in range(60)]
    written = settled([model] * num_ranks)
    assert sorted(p.name for rank in written for p in rank) == sorted(p.name for p in model)
    loads = [sum(p.num_bytes for p in rank) for rank in written]
    assert max(loads) - min(loads) <= 5 * MB


def test_shards_copies_of_shards_and_what_one_rank_has() -> None:
    """Two copies of two shards, a norm that all have, and a state of each rank's own."""
    everyones = [
        pieces("a b c d", offset=rank % 2) + pieces("norm", 9) + pieces(f"rank.{rank}", 3)
        for rank in range(4)
    ]
    written = settled(everyones)
    for rank, own in enumerate(written):
        assert pieces(f"rank.{rank}", 3)[0] in own
        shards = [p for p in own if p.num_bytes == MB]
        assert len(shards) == 2, "copies share the work"
        assert {p.offsets[0] for p in shards} == {rank % 2}
    assert sum(p.name == "norm" for own in written for p in own) == 1
    assert len({p for own in written for p in own}) == sum(map(len, written)) == 8 + 1 + 4


def test_a_rank_with_nothing_and_pieces_of_no_bytes() -> None:
    written = settled([[], pieces("a b", 0), pieces("a b", 0)])
    assert sorted(p.name for own in written for p in own) == ["a", "b"]


def on_ranks() -> tuple[list[bool], int]:
    rank = dist.get_rank()
    sharing = Sharing(dist.new_group(backend="gloo"))
    held = pieces("a b c") + pieces(f"rank.{rank}")
    first = sharing.of(held)
    assert sharing.of(held) == first
    assert sharing.num_settled == 1, "what has not changed is not asked again"
    assert sharing.of(held + pieces(f"more.{rank}") * (rank == 1)) == first + [True] * (rank == 1)
    return first, sharing.num_settled


def test_ranks_settle_it_once() -> None:
    results = run_ranks(on_ranks, 3)
    assert [sum(each) for each in zip(*(mine for mine, _ in results), strict=True)] == [1, 1, 1, 3]
    assert [count for _, count in results] == [2, 2, 2], "one that has changed is heard by all"


def talk() -> tuple[list[bytes], list[bytes]]:
    """What rank 0 gets of the others, and what all of them hear of it."""
    rank, group = dist.get_rank(), dist.new_group(backend="gloo")
    received: list[bytes] = []
    if rank:
        send_to_first(b"x" * rank, group)
    else:
        received = [receive_from(other, group) for other in (1, 2)]
    heard = [hear_first(text if rank == 0 else b"?", group) for text in (b"", b"seven b", b"12345")]
    return received, heard


def test_texts_of_any_length_go_between_ranks() -> None:
    results = run_ranks(talk, 3)
    assert results[0][0] == [b"x", b"xx"]
    assert [heard for _, heard in results] == [[b"", b"seven b", b"12345"]] * 3
