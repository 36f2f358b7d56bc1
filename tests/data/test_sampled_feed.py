"""Feeds whose ids a sampler has drawn."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from drivetrain.core.errors import ConfigError
from drivetrain.data.batches import BatchPlan, MicroBatch
from drivetrain.data.digest import digest_of
from drivetrain.data.keys import DATA, fold, turn_seed
from drivetrain.data.sampled_feed import Picked, PickedDataset, SampledFeed
from drivetrain.data.samplers import Drawn, UserSampler
from drivetrain.data.sources import Source
from tests.data.parts import Numbers, Order, source


class Talk:
    """The rank before, which drew what it is given."""

    before = 3

    def __init__(self, heard: Any = None) -> None:
        self.heard = heard
        self.told: list[list[int]] = []

    def tell(self, numbers: list[int]) -> None:
        self.told.append(numbers)

    def hear(self) -> Any:
        return self.told[-1] if self.heard is None else self.heard


def sampled(
    sampler: Any, plan: BatchPlan, *, rank: int = 0, yields_batches: bool = False, talk: Any = None
) -> SampledFeed:
    made = UserSampler.of(sampler, yields_batches=yields_batches)
    return SampledFeed(source(20, sampler=made), made, plan, rank, 1, talk)


def test_a_samplers_ids_are_cut_into_steps_as_any_datasets() -> None:
    feed = sampled(Order(9, 8, 7, 6, 5), BatchPlan(4, 2, 2, 5), rank=1)
    assert [picked.ids for picked in feed.picked(0)] == [[7, 6]]
    assert feed.sample_ids(0) == [7, 6]
    assert [picked.ids for picked in feed.picked(1)] == [[5]], "a turn without samples"
    assert feed.sample_ids(1) == []
    found = [[batch.tolist() for _, batch in turns] for turns in feed.steps(3, None)]
    assert found == [[[7, 6]], [[5]], [[7, 6]]]


def test_batches_of_a_sampler_are_micro_batches_weighed_by_their_true_size() -> None:
    plan = BatchPlan(6, 3, 2, 9)
    sampler = Order([1, 2, 3], [4], [5, 6])
    first = sampled(sampler, plan, yields_batches=True)
    second = sampled(sampler, plan, rank=1, yields_batches=True)
    first.check_size()
    assert first.picked(0) == [Picked(MicroBatch(0, 0, 0, 3, 4, 0), [1, 2, 3])]
    assert second.picked(0) == [Picked(MicroBatch(0, 1, 3, 4, 4, 0), [4])]
    assert first.picked(1) == [Picked(MicroBatch(1, 0, 4, 6, 2, 0), [5, 6])]
    assert second.picked(1) == [Picked(MicroBatch(1, -1, 0, 0, 2, 0), [5, 6])]
    assert first.sample_ids(0) == [1, 2, 3]
    assert second.sample_ids(0) == [], "batches differ in size, and a place would mislead"


@pytest.mark.parametrize(
    ("epoch", "size", "is_refused"),
    [(0, 2, True), (0, 4, True), (1, 2, False), (1, 4, True), (1, 3, False)],
)
def test_the_largest_batch_must_be_the_micro_batch(epoch: int, size: int, is_refused: bool) -> None:
    feed = sampled(Order([1, 2, 3]), BatchPlan(3, 3, 1, 3), yields_batches=True)
    found = Drawn(epoch, [[0] * size], 0, size)
    if not is_refused:
        feed._check_size(found)
        return
    with pytest.raises(ConfigError) as caught:
        feed._check_size(found)
    assert str(caught.value) == (
        f"DataLoader sampler = Order: yields batches of up to {size} ids, each of which is a "
        f"micro-batch, but micro_batch_size is 3; set micro_batch_size={size}"
    )


def test_ranks_compare_what_they_have_drawn_at_every_epochs_first_step() -> None:
    talk = Talk()
    feed = sampled(Order(3, 2, 1), BatchPlan(2, 2, 1, 3), talk=talk)
    for turns in feed.steps(4, None):
        list(turns)
    digest = digest_of([3, 2, 1])[0]
    assert talk.told == [[0, 3, digest], [1, 3, digest]]
    other = sampled(Order(3, 2, 1), BatchPlan(2, 2, 1, 3), talk=Talk([0, 3, 5]))
    with pytest.raises(ConfigError) as caught:
        next(other.steps(1, None))
    assert str(caught.value) == (
        "DataLoader sampler = Order: draws different ids in epoch 0 than that of rank 3; let it "
        "yield the ids of all ranks on every rank, because Drivetrain splits them, and let it draw "
        "from torch's, Python's or NumPy's global generators"
    )


def test_an_epoch_is_drawn_once_and_two_are_kept() -> None:
    sampler = Order(3, 2, 1)
    feed = sampled(sampler, BatchPlan(2, 2, 1, 3))
    sampler.epochs.clear()
    for epoch in (0, 1, 1, 2, 2):
        assert feed.drawn(epoch).epoch == epoch
    assert sampler.epochs == [1, 2]
    assert set(feed._drawn) == {1, 2}


def test_a_sampled_feed_knows_whether_it_resumes_with_what_it_was_saved() -> None:
    plan = BatchPlan(2, 2, 1, 3)
    feed = sampled(Order(3, 2, 1), plan)
    first = feed.first.digest
    assert feed.state_dict() == {
        "step": 0,
        "epoch": 0,
        "samples": 0,
        "drawn": None,
        "first_drawn": first,
    }
    next(feed.steps(3, None))
    state = feed.state_dict()
    assert (state["samples"], state["drawn"]) == (2, first)
    same = sampled(Order(3, 2, 1), plan)
    same.load_state_dict(state)
    assert same.state_dict() == state
    with pytest.raises(ConfigError) as caught:
        sampled(Order(3, 2, 1), plan).load_state_dict({**state, "drawn": 5})
    assert str(caught.value) == (
        "DataLoader sampler = Order: draws different ids in epoch 0 than before the run was saved; "
        "resume with the sampler, the weights and the data the run was started with"
    )
    another = sampled(Order(1, 2, 3), plan)
    another.load_state_dict(state)
    assert another.state_dict()["step"] == 1, "another sampler was accepted by name"


def test_picked_ids_are_read_under_the_seed_of_their_turn() -> None:
    class Draws(Numbers):
        def __getitem__(self, index: int) -> Any:
            return index, float(torch.rand(()))

    plan = BatchPlan(4, 2, 1, 20)
    keyed = PickedDataset(Source(Draws(), 20, shuffle=False), plan, 0, seed=5)
    (found,) = keyed.__getitems__(Picked(MicroBatch(3, 1, 0, 1, 4, 0), [7]))
    torch.manual_seed(turn_seed(fold(5, DATA), 3, 1))
    assert found == (7, float(torch.rand(())))
