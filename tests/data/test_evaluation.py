"""Evaluation: every sample once, on any number of ranks."""

from __future__ import annotations

from typing import Any

import pytest

from drivetrain.data.evaluation import EvaluationFeed
from drivetrain.data.samplers import Drawn, UserSampler
from drivetrain.data.sources import Source
from drivetrain.data.stream_shards import Shards
from tests.data.parts import Noted, Stream, source, stream_source


def batches(feed: EvaluationFeed, *, in_lockstep: bool = False) -> list[tuple[Any, int]]:
    return [
        (each.batch.flatten().tolist(), each.num_samples)
        for each in feed.batches(in_lockstep=in_lockstep)
    ]


def test_every_sample_is_evaluated_once_and_ranks_keep_step() -> None:
    feeds = [EvaluationFeed(source(7), 2, rank, 3) for rank in range(3)]
    assert [batches(feed) for feed in feeds] == [
        [([0, 1], 2), ([6], 1)],
        [([2, 3], 2)],
        [([4, 5], 2)],
    ]
    assert [batches(feed, in_lockstep=True)[1:] for feed in feeds] == [
        [([6], 1)],
        [([0], 0)],
        [([0], 0)],
    ]
    assert feeds[0].length == 7
    assert not feeds[0].is_sharded


@pytest.mark.parametrize(("most", "found"), [(3, [2, 1]), (4, [2, 2]), (9, [2, 2, 2, 1])])
def test_only_the_first_samples_are_evaluated_where_that_is_asked_for(
    most: int, found: list[int]
) -> None:
    feed = EvaluationFeed(source(7), 2, 0, 1, max_samples=most)
    assert [count for _, count in batches(feed)] == found
    assert feed.length == 7


def test_a_sampler_decides_what_is_evaluated() -> None:
    chosen = Drawn(0, [5, 3, 1], 0, 3)
    feed = EvaluationFeed(source(7), 2, 0, 1, drawn=chosen)
    assert (batches(feed), feed.length) == ([([5, 3], 2), ([1], 1)], 3)
    by_batch = UserSampler(None, yields_batches=True, length=2)
    whole = Drawn(0, [[5, 3, 1], [2]], 0, 4)
    feed = EvaluationFeed(source(7, sampler=by_batch), 2, 0, 1, drawn=whole)
    assert batches(feed) == [([5, 3, 1], 3), ([2], 1)]
    feed = EvaluationFeed(source(7, sampler=by_batch), 2, 0, 1, max_samples=2, drawn=whole)
    assert batches(feed) == [([5, 3], 2)]
    feed = EvaluationFeed(source(7, sampler=by_batch), 2, 0, 1, max_samples=4, drawn=whole)
    assert batches(feed) == [([5, 3, 1], 3), ([2], 1)]


def test_of_a_stream_every_rank_keeps_its_own_batches() -> None:
    feeds = [EvaluationFeed(stream_source(7), 2, rank, 3) for rank in range(3)]
    assert [batches(feed) for feed in feeds] == [
        [([0, 1], 2), ([6], 1)],
        [([2, 3], 2)],
        [([4, 5], 2)],
    ]
    assert [batches(feed, in_lockstep=True) for feed in feeds] == [
        [([0, 1], 2), ([6], 1)],
        [([2, 3], 2), ([6], 0)],
        [([4, 5], 2), ([6], 0)],
    ]
    assert feeds[0].length is None


def test_ranks_compare_a_stream_after_every_round() -> None:
    checked: Any = Noted()
    feed = EvaluationFeed(stream_source(5), 2, 0, 2, check=checked)
    assert [count for _, count in batches(feed)] == [2, 1]
    assert checked.notes == [
        "begins",
        (0, 4, False, True),
        (0, 5, True, True),
    ]


def test_a_stream_is_read_up_to_the_most_and_a_ready_batch_is_not_cut() -> None:
    assert batches(EvaluationFeed(stream_source(7), 2, 0, 1, max_samples=3)) == [
        ([0, 1], 2),
        ([2], 1),
    ]
    ready = EvaluationFeed(stream_source(3, size=2), 2, 0, 1, max_samples=5)
    assert batches(ready) == [([0, 0], 2), ([1, 1], 2)]
    whole = EvaluationFeed(stream_source(3, size=2), 2, 0, 1, max_samples=6)
    assert [count for _, count in batches(whole)] == [2, 2, 2]
    assert batches(EvaluationFeed(stream_source(0), 2, 0, 1), in_lockstep=True) == []


def test_a_rank_with_a_part_of_its_own_reads_all_of_it_and_keeps_the_others_company() -> None:
    sums: list[int] = []
    others = iter([2, 2, 1, 0])

    def sum_over_ranks(own: int) -> int:
        sums.append(own)
        return own + next(others)

    shards = Shards("already_sharded", sum_over_ranks)
    checked: Any = Noted()
    feed = EvaluationFeed(stream_source(3), 2, 1, 2, shards=shards, check=checked)
    assert feed.is_sharded
    assert batches(feed, in_lockstep=True) == [([0, 1], 2), ([2], 1), ([0, 1], 0)]
    assert sums == [2, 1, 0, 0]
    assert checked.notes == ["begins", (0, 2, False, True)], "what it began with"
    alone = EvaluationFeed(stream_source(5), 2, 1, 2, max_samples=5, shards=shards)
    assert batches(alone) == [([0, 1], 2)], "rank 1 of two has two of five samples"


def test_a_rank_asks_for_its_own_part_of_as_many_as_there_are_ranks() -> None:
    asked: list[tuple[int, int]] = []

    class Parts(Stream):
        def shard(self, num_shards: int, index: int) -> Stream:
            asked.append((num_shards, index))
            return Stream(1)

    made = Source(Parts(9), None, shuffle=False)
    feed = EvaluationFeed(made, 2, 1, 3, shards=Shards("own_shard", int))
    assert batches(feed) == [([0], 1)]
    assert asked == [(3, 1)]
