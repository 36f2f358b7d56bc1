"""Feeds: a rank's turns, step by step, of samples that can be looked up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from drivetrain.data import elastic_feed
from drivetrain.data.batches import BatchPlan, DataPosition, MicroBatch
from drivetrain.data.elastic_feed import ElasticFeed, _OrderFrom, own_turns
from drivetrain.data.feed import KeyedDataset, MapFeed, PlannedOrder, position_in
from drivetrain.data.keys import DATA, fold, turn_seed
from drivetrain.data.rank_sample_ids import RankSampleIds
from drivetrain.data.sources import Source
from tests.data.parts import Numbers, source


def test_a_steps_samples_are_dealt_to_whoever_is_there() -> None:
    feed = ElasticFeed(source(), BatchPlan(4, 2, 2, 20), seed=1)
    with pytest.raises(ValueError, match="needs to know its number of steps"):
        next(feed.steps(None, 1))
    steps = feed.steps(3, None)
    assert list(next(steps)) == []
    first = [(micro.index, batch.tolist()) for micro, batch in feed.deal(0, 2, 1)]
    assert first == [(1, [2, 3])]
    alone = [(micro.index, batch.tolist()) for micro, batch in feed.deal(1, 1, 0)]
    assert alone == [(0, [4, 5]), (1, [6, 7])]
    again = [batch.tolist() for _, batch in feed.deal(1, 1, 0)]
    assert again == [[4, 5], [6, 7]], "a step may be asked for a second time"
    on = [batch.tolist() for _, batch in feed.deal(2, 1, 0)]
    assert on == [[8, 9], [10, 11]]
    assert list(feed.deal(2, 3, 2)) == [], "turns without samples are left out"
    feed.steps_done = 3
    assert list(steps) == []


def test_a_dealt_feed_stands_where_its_loop_says() -> None:
    feed = ElasticFeed(source(), BatchPlan(4, 2, 2, 20), seed=1)
    assert feed.state_dict() == {"step": 0, "epoch": 0, "samples": 0}
    feed.load_state_dict({"step": 6, "epoch": 1, "samples": 6})
    assert feed.steps_done == 6
    assert feed.state_dict() == {"step": 6, "epoch": 1, "samples": 6}


def test_a_dealt_feed_reads_with_the_options_of_its_loader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[dict[str, Any]] = []

    def loader(dataset: Any, **options: Any) -> list[Any]:
        asked.append(options)
        return []

    monkeypatch.setattr(elastic_feed, "DataLoader", loader)
    feed = ElasticFeed(source(num_workers=2, prefetch_factor=5), BatchPlan(4, 2, 2, 20), seed=1)
    assert list(feed.deal(0, 3, 2)) == []
    assert asked[0]["num_workers"] == 2
    assert asked[0]["prefetch_factor"] == 5


def test_a_loader_of_a_seat_is_asked_for_its_turns_only() -> None:
    plan = BatchPlan(4, 2, 3, 6)
    assert own_turns(plan, 0, 2) == []
    assert len(own_turns(plan, 0, 1)) == 1
    order = _OrderFrom(plan, 1, 1, 4)
    assert len(order) == len(list(order)) == 3
    assert [micro.step for micro in order] == [1, 2, 3]


def test_a_map_feed_yields_a_ranks_turns_step_by_step() -> None:
    feed = MapFeed(source(10), BatchPlan(4, 1, 2, 10), rank=1, seed=1)
    with pytest.raises(ValueError, match="either total_steps or num_epochs is needed"):
        next(feed.steps(None, None))
    found = [[batch.tolist() for _, batch in turns] for turns in feed.steps(None, 1)]
    assert found == [[[2], [3]], [[6], [7]], [[8], [8]]]
    assert len(found) == 3
    assert feed.state_dict() == {"step": 3, "epoch": 1, "samples": 0}
    assert feed.sample_ids(1) == [6, 7]
    assert feed.sample_ids(2) == [], "turns without samples have none"
    feed.load_state_dict({"step": 1})
    assert feed.state_dict() == {"step": 1, "epoch": 0, "samples": 4}
    (turns,) = feed.steps(2, None)
    assert [(micro.step, micro.index, batch.tolist()) for micro, batch in turns] == [
        (1, 2, [6]),
        (1, 3, [7]),
    ]


def test_an_oldest_position_says_only_its_step() -> None:
    plan = BatchPlan(4, 1, 2, 10)
    assert position_in({"step": 4}, plan) == DataPosition(4, 1, 4)
    assert position_in({"step": 4, "epoch": 2, "samples": 3}, plan) == DataPosition(4, 2, 3)


def test_samples_are_read_under_the_seed_of_their_turn() -> None:
    class Draws(Numbers):
        def __getitem__(self, index: int) -> Any:
            return float(torch.rand(()))

    plan = BatchPlan(4, 2, 1, 20)
    micro = plan.micro_batches(3, 0)[1]
    keyed = KeyedDataset(Source(Draws(), 20, shuffle=False), plan, 0, seed=5)
    found = keyed.__getitems__(micro)
    torch.manual_seed(turn_seed(fold(5, DATA), 3, 1))
    assert found == [float(torch.rand(())) for _ in range(2)]
    quiet = KeyedDataset(Source(TensorDataset(torch.arange(20)), 20, shuffle=False), plan, 0, 5)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    assert [int(each[0]) for each in quiet.__getitems__(micro)] == [14, 15]
    assert torch.equal(torch.get_rng_state(), before), "tensors in memory draw nothing"


def test_batches_are_paired_with_what_was_asked_for() -> None:
    order = PlannedOrder(BatchPlan(4, 2, 1, 20), 0, range(1))
    asked = list(order)
    assert list(order.pair_with(["a", "b"])) == list(zip(asked, ["a", "b"], strict=True))


def test_ids_are_computed_for_a_stretch_of_steps() -> None:
    plan = BatchPlan(4096, 2048, 2, 1_000_000)
    ids = RankSampleIds(plan, 0, seed=3, shuffle=True)
    first = ids.ids(plan.micro_batches(0, 0)[0])
    assert len(ids._ids) == 4, "as many steps as have 8,192 samples"
    known = ids._ids
    ids.ids(plan.micro_batches(3, 0)[0])
    assert ids._ids is known
    ids.ids(plan.micro_batches(4, 0)[0])
    assert ids._ids is not known
    assert ids.ids(plan.micro_batches(0, 0)[0]) == first
    large = RankSampleIds(BatchPlan(40000, 20000, 1, 80000), 0, 3, shuffle=True)
    assert large._steps_ahead == 1
    idle = RankSampleIds(BatchPlan(2, 2, 2, 20), 1, 3, shuffle=True)
    assert idle._steps_ahead == 8192
    stream = RankSampleIds(BatchPlan(4, 2, 1, None), 0, 3, shuffle=True)
    with pytest.raises(ValueError, match="a stream has no ids"):
        stream.ids(MicroBatch(0, 0, 0, 2, 4, 0))
