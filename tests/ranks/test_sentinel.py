"""The sentinel: one flipped bit in one copy is found at the next check, and named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from drivetrain.core.errors import ReplicaDrift, WorkerFailure
from drivetrain.testing import run_ranks
from drivetrain.train.hooks import Hook
from drivetrain.train.keep_loop import prepare
from drivetrain.train.trainer import Trainer
from drivetrain.train.watch.sentinel import Drift, bit_sums, find_drifts, where_from
from tests.ranks.small_task import samples, small_task

PARAMETER, FLIPPED_AFTER = "2.weight", 4


def flip_lowest_bit(parameter: torch.Tensor) -> None:
    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    local.detach().view(torch.int32).view(-1)[0] ^= 1


class CosmicRay(Hook):
    """Flips the lowest bit of one weight on one rank."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def on_train_batch_end(self, trainer: Trainer, step: int) -> None:
        assert trainer.assembly is not None
        if step == FLIPPED_AFTER and trainer.assembly.world.rank == self._rank:
            flip_lowest_bit(trainer.model.get_parameter(PARAMETER))


def settings(output_dir: str, **changes: Any) -> dict[str, Any]:
    return {
        "global_batch_size": 12,
        "micro_batch_size": 3,
        "max_steps": 12,
        "output_dir": output_dir,
        "checkpoint": {"every_steps": None},
        "record": {"progress": "none", "sinks": []},
        "sentinel": {"every_steps": 5},
        **changes,
    }


def train(output_dir: str, flipped_on: int | None, **changes: Any) -> tuple[int, str]:
    """How many steps were done, and what stopped the run."""
    hooks = [] if flipped_on is None else [CosmicRay(flipped_on)]
    trainer = Trainer(small_task(width=8), settings(output_dir, **changes), hooks)
    try:
        trainer.fit(samples())
    except ReplicaDrift as drift:
        assert trainer.assembly is not None
        return trainer.assembly.engine.meter._closed[-1].number, str(drift)
    return len(trainer.history.steps), ""


def train_kept_loop(output_dir: str) -> str:
    task = small_task(width=8)
    loop = prepare(task.model, None, samples(), settings(output_dir))
    try:
        for number, step in enumerate(loop.steps()):
            for x, y in step:
                loop.backward(F.cross_entropy(loop.model(x), y))
            loop.step()
            if number + 1 == FLIPPED_AFTER and not loop.is_main:
                flip_lowest_bit(dict(loop.model.named_parameters())[PARAMETER])
    except ReplicaDrift as drift:
        return str(drift)
    return ""


def train_both(output_dir: str) -> tuple[tuple[int, str], tuple[int, str], str]:
    healthy, hit = train(output_dir, None), train(output_dir, 1)
    return healthy, hit, train_kept_loop(output_dir)


def test_a_flipped_bit_is_found_at_the_next_check(tmp_path: Path) -> None:
    for healthy, (steps, message), in_own_loop in run_ranks(train_both, 2, 60, (str(tmp_path),)):
        assert healthy == (12, "")
        assert steps == 5
        for text in (message, in_own_loop):
            assert f"after step 5 the copies of {PARAMETER} " in text
            assert "ranks 0, 1 differ, and it is unknown which of them is right" in text
            assert text.endswith("start the run anew: no earlier step of it was checked")


def test_a_step_that_agreed_is_named_to_resume_from() -> None:
    for nothing in (None, 0):
        assert "checkpoint" not in where_from(nothing)
    assert (
        where_from(15) == "resume from a checkpoint of step 15 or earlier: until then they agreed"
    )


def drift_in_a_short_run(output_dir: str, saves_every: int | None) -> str:
    """What ends a run of 12 steps that would be compared first at step 100."""
    rare = {"sentinel": {"every_steps": 100}, "checkpoint": {"every_steps": saves_every}}
    trainer = Trainer(small_task(width=8), settings(output_dir, **rare), [CosmicRay(1)])
    with pytest.raises(ReplicaDrift) as drift:
        trainer.fit(samples())
    return str(drift.value)


def drift_in_short_runs(output_dir: str) -> tuple[str, str]:
    return drift_in_a_short_run(output_dir, None), drift_in_a_short_run(output_dir, 6)


def test_copies_are_compared_before_every_save_and_at_the_end(tmp_path: Path) -> None:
    for at_the_end, at_a_save in run_ranks(drift_in_short_runs, 2, 60, (str(tmp_path),)):
        assert f"after step 12 the copies of {PARAMETER} " in at_the_end
        assert f"after step 6 the copies of {PARAMETER} " in at_a_save
    assert not list(tmp_path.glob("**/manifest.json")), "what differs is not saved"


def train_hsdp_and_ddp(output_dir: str) -> tuple[str, str, str]:
    hsdp = {"strategy": "fsdp", "dp_replicate": 2, "dp_shard": 2}
    return (
        train(output_dir, 2)[1],
        train(output_dir, None, parallel=hsdp)[1],
        train(output_dir, None, parallel={"strategy": "fsdp"})[1],
    )


@pytest.mark.slow
def test_a_majority_tells_which_rank_is_odd(tmp_path: Path) -> None:
    for ddp, healthy_hsdp, fsdp in run_ranks(train_hsdp_and_ddp, 4, 120, (str(tmp_path),)):
        assert "rank 2 differs from ranks 0, 1, 3" in ddp
        assert healthy_hsdp == fsdp == ""


def train_hsdp(output_dir: str) -> tuple[int, str]:
    return train(output_dir, 3, parallel={"strategy": "fsdp", "dp_replicate": 2, "dp_shard": 2})


@pytest.mark.slow
@pytest.mark.long
def test_a_shard_is_held_against_its_counterpart(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailure, match="ranks 1, 3 differ"):
        # ranks 0 and 2 have nothing to complain of, and only see the others leave
        run_ranks(must_not_drift, 4, 120, (str(tmp_path),))


def must_not_drift(output_dir: str) -> None:
    _, message = train_hsdp(output_dir)
    assert not message, message


def test_any_bit_changes_the_sum() -> None:
    weights = torch.randn(7, 5)
    before = bit_sums([weights]).item()
    for bit in range(32):
        flipped = weights.clone()
        flipped.view(torch.int32)[3, 2] ^= 1 << bit if bit < 31 else -(1 << 31)
        assert bit_sums([flipped]).item() != before


def test_the_sum_follows_from_the_values_alone() -> None:
    weights = torch.randn(9, 5)
    apart = torch.cat([torch.zeros(1), weights.flatten()])[1:].view(9, 5)
    turned = weights.t().contiguous().t()
    assert apart.storage_offset() == 1
    assert not turned.is_contiguous()
    assert bit_sums([weights, apart, turned]).unique().numel() == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.int8])
def test_every_number_format_has_a_sum(dtype: torch.dtype) -> None:
    ones = torch.ones(3, dtype=dtype)
    assert bit_sums([ones]).dtype is torch.int64
    assert bit_sums([ones]).item() != bit_sums([ones * 2]).item()


def test_who_is_odd() -> None:
    names = ["a", "b", "c"]
    assert find_drifts(names, {0: [1, 2, 3], 1: [1, 2, 3]}) == []
    assert find_drifts(names, {0: [1, 2, 3], 1: [1, 9, 3]}) == [Drift("b", (0, 1))]
    by_rank = {0: [1, 2, 3], 1: [1, 2, 3], 4: [1, 2, 8], 5: [7, 2, 3]}
    assert find_drifts(names, by_rank) == [Drift("a", (5,)), Drift("c", (4,))]
