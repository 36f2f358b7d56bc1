from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Task, Trainer
from drivetrain.config import load_config
from drivetrain.core.errors import ConfigError
from drivetrain.data.batches import BatchPlan, DataPosition, share, solve_micro_batch
from drivetrain.data.keys import DATA, INIT, MODEL, fold, turn_seed
from drivetrain.data.permutation import Order
from drivetrain.data.rank_sample_ids import RankSampleIds


@st.composite
def plans(draw: st.DrawFn) -> BatchPlan:
    micro = draw(st.integers(1, 5))
    return BatchPlan(
        global_batch_size=micro * draw(st.integers(1, 9)),
        micro_batch_size=micro,
        num_ranks=draw(st.integers(1, 7)),
        length=draw(st.integers(1, 120)),
    )


@given(plans())
def test_an_epoch_holds_every_sample_exactly_once(plan: BatchPlan) -> None:
    assert plan.steps_per_epoch is not None
    assert plan.length is not None
    seen: Counter[int] = Counter()
    for rank in range(plan.num_ranks):
        ids = RankSampleIds(plan, rank, seed=7, shuffle=True)
        for step in range(plan.steps_per_epoch):
            turns = plan.micro_batches(step, rank)
            assert len(turns) == plan.accumulation
            for micro in turns:
                assert 0 <= micro.start < plan.length
                if micro.num_samples:
                    seen.update(ids.ids(micro))
    assert seen == Counter(range(plan.length))


@given(plans(), st.integers(0, 50))
def test_micro_batches_are_the_same_at_any_number_of_ranks(plan: BatchPlan, step: int) -> None:
    def cut(num_ranks: int) -> list[tuple[int, int, int, int]]:
        other = BatchPlan(plan.global_batch_size, plan.micro_batch_size, num_ranks, plan.length)
        return [
            (micro.index, micro.start, micro.stop, micro.batch_samples)
            for rank in range(num_ranks)
            for micro in other.micro_batches(step, rank)
            if micro.num_samples
        ]

    assert cut(plan.num_ranks) == cut(1)


@given(st.integers(0, 1000), st.integers(1, 50))
def test_shares_are_even_and_complete(num_samples: int, num_parts: int) -> None:
    cuts = [share(num_samples, num_parts, i) for i in range(num_parts)]
    sizes = [stop - start for start, stop in cuts]
    assert sum(sizes) == num_samples
    assert max(sizes) - min(sizes) <= 1
    assert all(a[1] == b[0] for a, b in itertools.pairwise(cuts))


@settings(max_examples=60)
@given(st.integers(1, 3000), st.integers(0, 2**40), st.integers(0, 100))
def test_an_order_is_a_permutation_that_can_be_asked_for_in_parts(
    length: int, seed: int, epoch: int
) -> None:
    order = Order(length, seed, epoch)
    whole = order.ids(torch.arange(length)).tolist()
    assert sorted(whole) == list(range(length))
    middle = length // 2
    assert order.ids(torch.arange(middle, length)).tolist() == whole[middle:]


@given(plans(), st.integers(0, 60))
def test_a_ranks_ids_can_be_asked_for_in_any_order(plan: BatchPlan, step: int) -> None:
    """A resumed run starts in the middle; loader processes each see only some of the turns."""
    assert plan.length is not None
    epoch = plan.micro_batches(step, 0)[0].epoch
    order = Order(plan.length, 7, epoch)
    for micro in plan.micro_batches(step, plan.num_ranks - 1):
        fresh = RankSampleIds(plan, plan.num_ranks - 1, seed=7, shuffle=True)
        positions = torch.arange(micro.start, plan.stop_of(micro))
        assert fresh.ids(micro) == order.ids(positions).tolist()


def test_seed_and_epoch_change_the_order() -> None:
    orders = {
        tuple(Order(50, seed, epoch).ids(torch.arange(50)).tolist())
        for seed in range(4)
        for epoch in range(4)
    }
    assert len(orders) == 16


def test_positions_are_uniform_over_seeds() -> None:
    """Quarters of ids fall evenly on quarters of positions: chi-squared, far beyond chance."""
    length, trials = 48, 400
    counts: Counter[tuple[int, int]] = Counter()
    for seed in range(trials):
        ids = Order(length, seed, 0).ids(torch.arange(length)).tolist()
        counts.update((position // 12, i // 12) for position, i in enumerate(ids))
    expected = trials * length / 16
    chi2 = sum((counts[p, i] - expected) ** 2 / expected for p in range(4) for i in range(4))
    assert len(counts) == 16
    assert chi2 < 40  # 9 degrees of freedom: by chance less than once in 100,000


def test_a_billion_samples_need_no_list() -> None:
    ids = Order(10**9, seed=1, epoch=0).ids(torch.arange(999_999_990, 10**9))
    assert len(set(ids.tolist())) == 10
    assert all(0 <= i < 10**9 for i in ids.tolist())


def test_the_micro_batch_is_chosen_with_a_reason() -> None:
    resolved = solve_micro_batch(load_config(argv=["global_batch_size=64", "max_steps=1"]), 4)
    assert resolved.config.micro_batch_size == 16
    assert "64 samples over 4 ranks" in str(resolved.source("micro_batch_size"))


def test_a_batch_that_does_not_divide_is_answered_with_ones_that_do() -> None:
    with pytest.raises(ConfigError) as raised:
        solve_micro_batch(load_config(argv=["global_batch_size=64", "max_steps=1"]), 3)
    assert str(raised.value) == (
        "global_batch_size = 64: does not divide into 3 equal micro-batches; use 63 or 66, "
        "set micro_batch_size to a divisor (2, 4, 8, 16), or change the number of ranks"
    )


def test_the_plan_reads_like_a_sentence() -> None:
    assert str(BatchPlan(64, 4, 3, 100)) == (
        "64 samples a step = micro-batch 4 × accumulation 6 × 3 ranks "
        "(2 of these 18 micro-batches are empty)"
    )


def test_seeds_and_orders_are_those_of_every_release() -> None:
    """A run may go on with another release: then each of these numbers decides its samples."""
    assert (INIT, MODEL, DATA) == (1, 2, 3)
    assert fold(1, 2, 3) == 3851293329796251419
    assert fold(42, 0) == 3166309114763032834
    assert turn_seed(fold(42, MODEL), 7, 3) == 57689661062218768
    assert turn_seed(fold(42, MODEL), 0, -1) == 970863381186930293
    assert Order(10, 1, 2).ids(torch.arange(10)).tolist() == [8, 7, 1, 3, 4, 6, 9, 5, 0, 2]
    some = Order(100_000, 42, 1).ids(torch.arange(0, 100_000, 12_500)).tolist()
    assert some == [58621, 17709, 17575, 45570, 5736, 3436, 38087, 67265]
    first = Order(10**9, 42, 0).ids(torch.arange(5)).tolist()
    assert first == [998488750, 212065205, 569474912, 381271589, 266202149]


def test_an_order_that_is_not_shuffled_or_has_one_sample_is_the_positions() -> None:
    positions = torch.tensor([2, 0, 1])
    assert Order(3, 1, 0, shuffle=False).ids(positions).tolist() == [2, 0, 1]
    assert Order(1, 1, 0).ids(torch.tensor([0])).tolist() == [0]
    assert sorted(Order(2, 3, 0).ids(torch.arange(2)).tolist()) == [0, 1]
    assert {tuple(Order(2, seed, 0).ids(torch.arange(2)).tolist()) for seed in range(20)} == {
        (0, 1),
        (1, 0),
    }


def test_a_run_stands_where_its_steps_have_led_it() -> None:
    plan = BatchPlan(4, 2, 2, 10)
    assert [plan.position(step) for step in range(5)] == [
        DataPosition(0, 0, 0),
        DataPosition(1, 0, 4),
        DataPosition(2, 0, 8),
        DataPosition(3, 1, 0),
        DataPosition(4, 1, 4),
    ]
    assert [plan.end_of(epoch) for epoch in (0, 1, 2)] == [3, 6, 9]
    assert plan.micro_batches(2, 0)[0].batch_samples == 2, "the epoch's last batch is short"


def test_another_batch_size_begins_in_the_middle_of_an_epoch() -> None:
    plan = BatchPlan(4, 2, 1, 10).going_on_from(DataPosition(5, 1, 7))
    assert plan.start == DataPosition(5, 1, 7)
    assert plan.position(5) == DataPosition(5, 1, 7)
    assert plan.position(6) == DataPosition(6, 2, 0), "three samples are one step"
    assert (plan.end_of(1), plan.end_of(2)) == (6, 9)
    own = BatchPlan(4, 2, 1, 10)
    assert own.going_on_from(DataPosition(4, 1, 4)) is own
    ended = own.going_on_from(DataPosition(5, 1, 10))
    assert ended.position(5) == DataPosition(5, 2, 0), "an epoch that is over is not gone on with"


def test_a_stream_has_no_steps_known_in_advance() -> None:
    plan = BatchPlan(4, 2, 1, None)
    assert plan.steps_per_epoch is None
    with pytest.raises(ValueError, match="number of steps of a stream is not known"):
        plan.position(1)


def test_a_turn_without_samples_reads_the_batchs_first_ones() -> None:
    idle = BatchPlan(4, 4, 2, 10).micro_batches(0, 1)[0]
    assert (idle.index, idle.num_samples) == (-1, 0)
    assert BatchPlan(4, 4, 2, 10).stop_of(idle) == 4
    short = BatchPlan(4, 4, 2, 10).micro_batches(2, 1)[0]
    assert (short.start, BatchPlan(4, 4, 2, 10).stop_of(short)) == (8, 10)


def test_many_idle_turns_are_answered_with_what_to_change() -> None:
    assert BatchPlan(4, 4, 4, 100).idle_warning == (
        "3 of 4 micro-batch slots per step have no samples: global_batch_size 4 is 1 micro-batches "
        "of 4; use at most 1 data-parallel ranks, a global_batch_size of 16 (micro_batch_size 4 × "
        "4 ranks) or a multiple of it, or micro_batch_size 1"
    )
    assert BatchPlan(64, 8, 3, 100).idle_warning.endswith(", or micro_batch_size 2")
    assert BatchPlan(32, 8, 3, 100).idle_warning.endswith(  # not one smaller than the user's
        "use a global_batch_size of 48 (micro_batch_size 8 × 3 ranks × accumulation 2) or another "
        "multiple of 24, or micro_batch_size 1"
    )
    assert "or micro_batch_size" not in BatchPlan(18, 2, 5, 100).idle_warning, "1 is no better"
    assert BatchPlan(4, 4, 8, 100).idle_warning.endswith(
        "a multiple of it; no micro_batch_size gives each of 8 ranks a sample"
    )
    assert BatchPlan(18, 2, 5, 100).idle_warning, "one turn of ten is a lot"
    assert not BatchPlan(20, 2, 11, 100).idle_warning, "one of eleven is not"


def test_one_rank_is_one_rank() -> None:
    text = "8 samples a step = micro-batch 8 × accumulation 1 × 1 rank"
    assert str(BatchPlan(8, 8, 1, 8)) == text


def test_a_chosen_micro_batch_is_left_alone_and_one_rank_has_one() -> None:
    words = ["global_batch_size=6", "max_steps=1"]
    given = load_config(argv=[*words, "micro_batch_size=2"])
    assert solve_micro_batch(given, 4) is given
    alone = solve_micro_batch(load_config(argv=words), 1)
    assert alone.config.micro_batch_size == 6
    assert "6 samples over 1 rank in one micro-batch" in str(alone.source("micro_batch_size"))
    with pytest.raises(ConfigError, match=r"use 8, set micro_batch_size to a divisor \(1\)"):
        solve_micro_batch(load_config(argv=words), 8)


def test_a_batch_sampler_is_answered_with_multiples_of_its_batches(quiet: dict[str, Any]) -> None:
    task = Task(lambda: nn.Linear(1, 1), lambda model, batch: model(batch[0]).mean())
    loader = DataLoader(
        TensorDataset(torch.ones(14, 1)),
        batch_sampler=[list(range(7)), list(range(7, 14))],
    )
    with pytest.raises(ConfigError, match="largest batch, 7; use 14 or 21"):
        Trainer(task, {"global_batch_size": 16, "max_steps": 1, **quiet}).fit(loader)


def test_ids_are_looked_up_for_a_stretch_of_steps_and_not_again() -> None:
    plan = BatchPlan(4, 2, 2, 10)
    ids = RankSampleIds(plan, 1, seed=7, shuffle=True)
    order = Order(10, 7, 1)
    for step in (3, 4, 5):
        for micro in plan.micro_batches(step, 1):
            positions = torch.arange(micro.start, plan.stop_of(micro))
            assert ids.ids(micro) == order.ids(positions).tolist()
    in_order = RankSampleIds(plan, 1, seed=7, shuffle=False)
    assert in_order.ids(plan.micro_batches(1, 1)[0]) == [6, 7]
