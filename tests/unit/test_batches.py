from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.config import load_config
from drivetrain.core.errors import ConfigError
from drivetrain.data.batches import BatchPlan, share, solve_micro_batch
from drivetrain.data.own_ids import OwnIds
from drivetrain.data.permutation import Order


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
        ids = OwnIds(plan, rank, seed=7, shuffle=True)
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
        fresh = OwnIds(plan, plan.num_ranks - 1, seed=7, shuffle=True)
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
    with pytest.raises(ConfigError, match="use 63 or 66, or set micro_batch_size"):
        solve_micro_batch(load_config(argv=["global_batch_size=64", "max_steps=1"]), 3)


def test_the_plan_reads_like_a_sentence() -> None:
    assert str(BatchPlan(64, 4, 3, 100)) == (
        "64 samples a step = micro-batch 4 × accumulation 6 × 3 ranks (2 of 18 turns idle)"
    )
