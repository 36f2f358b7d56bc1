"""fsdp, gradients reduced in every micro-batch: the same losses, in less memory."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from drivetrain.parallel.layout import Layout
from drivetrain.strategies.fsdp import FSDP
from drivetrain.strategies.fsdp.strategy import FSDPModel, FSDPStrategy
from drivetrain.strategies.strategy import Profile
from drivetrain.testing import run_ranks
from tests.ranks import matrix
from tests.ranks.training import largest_deviation

STEPS = 6
WIDTH, BLOCKS, MICRO_BATCHES = 512, 12, 3
WHOLE = BLOCKS * WIDTH * WIDTH * 4
"""Bytes of all gradients, unsharded."""


def parallel(every: bool, **more: Any) -> dict[str, Any]:
    return {**matrix.FSDP, "fsdp": {"reduce_every_micro_batch": every}, **more}


def train(folder: str, layouts: dict[str, dict[str, Any]]) -> dict[str, list[float]]:
    return {name: matrix.train("gpt", folder, layout, STEPS)[0] for name, layout in layouts.items()}


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [2, 4])
def test_losses_are_those_of_one_process(ranks: int, tmp_path: Path) -> None:
    layouts = {"once": parallel(False), "each": parallel(True), "each again": parallel(True)}
    if ranks == 4:
        layouts = {
            "hsdp": parallel(True, dp_replicate=2, dp_shard=2),
            "pipeline": parallel(True, pp=2),
        }
    alone = matrix.alone("gpt", str(tmp_path), STEPS)
    losses = run_ranks(train, ranks, 250, args=(str(tmp_path / "ranks"), layouts))[0]
    for name, found in losses.items():
        deviation = largest_deviation(found, alone)
        assert deviation <= matrix.TOLERANCE, f"{name}: losses part by {deviation:.2e}"
    if ranks == 2:
        assert losses["each"] == losses["each again"]


def live_bytes() -> int:
    """Of all tensors that there are, gradients included."""
    found = [x for x in gc.get_objects() if isinstance(x, torch.Tensor)]
    found += [x.grad for x in found if x.is_leaf and x.grad is not None]
    local = (x.to_local() if isinstance(x, DTensor) else x for x in found)
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in local}
    return sum(storages.values())


def held_between_micro_batches(every: bool) -> int:
    """Bytes that two micro-batches of three have left behind."""
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS)))
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    sharded = FSDPModel(model, mesh, reduces_every_micro_batch=every)
    x = torch.ones(1, WIDTH)
    before = live_bytes()
    for index in range(2):
        with sharded.micro_batch(index, is_last=index == MICRO_BATCHES - 1):
            model(x).sum().backward()
    return live_bytes() - before


@pytest.mark.parametrize("every", [False, True], ids=["once", "each"])
def test_what_is_held_between_micro_batches_is_what_the_cost_says(every: bool) -> None:
    held = max(run_ranks(held_between_micro_batches, 2, args=(every,)))
    facts = Profile(0, WHOLE, WHOLE, 2 * WHOLE, micro_batches_per_step=MICRO_BATCHES)
    strategy = FSDPStrategy(FSDP(reduce_every_micro_batch=every))
    cost = strategy.cost(facts, Layout(dp_shard=2), None)  # type: ignore[arg-type]  # not looked at
    assert cost.gradient_bytes == (WHOLE // 2 if every else WHOLE)
    # beside them at the most one block's, which is being reduced
    assert cost.gradient_bytes <= held <= cost.gradient_bytes + WHOLE // BLOCKS
