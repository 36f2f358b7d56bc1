"""Optimizers that update many tensors in one call, on models whose tensors are of several kinds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from drivetrain.config.schema import Optimization
from drivetrain.parallel.parts import own_part
from drivetrain.testing import run_ranks
from drivetrain.train.optimization.groups import keep_kinds_apart
from drivetrain.train.trainer import Trainer
from tests.ranks import matrix
from tests.ranks.models import task_of
from tests.ranks.training import largest_deviation

STEPS = 4


def own_groups(parameters: Iterable[nn.Parameter], _: Optimization) -> torch.optim.Optimizer:
    """A user's own: two groups, each with plain tensors and DTensors, for-loop left behind."""
    trained = list(parameters)
    groups: list[dict[str, Any]] = [{"params": trained[::2]}, {"params": trained[1::2], "lr": 1e-3}]
    return torch.optim.AdamW(groups, lr=2e-3, foreach=True)


def train(folder: str, parallel: dict[str, Any], how: str, **checkpoint: Any) -> tuple[Any, ...]:
    task, data = task_of("gpt")
    optimization = {"learning_rate": 2e-3, "max_grad_norm": 1.0}
    if how == "own groups":
        task = replace(task, optimizer=own_groups)
    else:
        optimization["adamw_implementation"] = how  # type: ignore[assignment]
    more = {"checkpoint": {"every_steps": None, **checkpoint}, "optimization": optimization}
    steps = STEPS // 2 if "every_steps" in checkpoint else STEPS
    trainer = Trainer(task, matrix.config(folder, steps, parallel, **more))
    history = trainer.fit(data)
    optimizer = trainer.assembly.engine.optimizer if trainer.assembly else None
    return history.losses, str(history.run_dir), len(optimizer.param_groups if optimizer else ())


def step_a_used_optimizer() -> list[int]:
    """A user's optimizer that goes through several runs: how many groups it has after each step."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shared = nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]))
    plain = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([shared, plain], lr=0.1, foreach=True)
    found = []
    for _ in range(3):
        keep_kinds_apart(optimizer)
        for parameter in (shared, plain):
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        found.append(len(optimizer.param_groups))
    assert plain.allclose(torch.tensor(0.7))
    assert own_part(shared).allclose(torch.tensor(0.7))
    return found


def test_an_optimizer_can_be_used_again() -> None:
    assert run_ranks(step_a_used_optimizer, 2, 60) == [[1, 1, 1]] * 2


def train_and_resume(folder: str, how: str) -> tuple[list[float], list[float], int]:
    """Under tp; and begun without it on each rank alone, resumed under it."""
    losses, _, num_groups = train(folder, {"tp": 2}, how)
    begun, run, _ = train(folder, {"strategy": "ddp"}, how, every_steps=STEPS // 2)
    rest, _, _ = train(folder, {"tp": 2}, how, resume_from=run)
    return losses, begun + rest, num_groups


@pytest.mark.parametrize(
    ("how", "num_groups"),
    [
        ("foreach", 1),
        pytest.param("fused", 1, marks=pytest.mark.slow),
        pytest.param("own groups", 2, marks=[pytest.mark.slow, pytest.mark.long]),
        pytest.param("for_loop", 1, marks=[pytest.mark.slow, pytest.mark.long]),
    ],
)
@pytest.mark.long
def test_shared_layers_train_with_every_implementation(
    tmp_path: Path, how: str, num_groups: int
) -> None:
    reference = train(str(tmp_path), {}, how)[0]
    for losses, resumed, found in run_ranks(train_and_resume, 2, 500, args=(str(tmp_path), how)):
        assert largest_deviation(losses, reference) <= matrix.TOLERANCE
        assert largest_deviation(resumed, reference) <= matrix.TOLERANCE
        assert found == num_groups, "what is saved and scheduled are the optimizer's own groups"


class Counting(torch.optim.Optimizer):
    """Not torch's own: it counts its steps in its groups, as schedule-free ones do."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1, "foreach": True, "k": 0})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1


def count_three_steps() -> int:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shared = nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]))
    optimizer = Counting([shared, nn.Parameter(torch.ones(3))])
    keep_kinds_apart(optimizer)
    for _ in range(3):
        optimizer.step()
    return int(optimizer.param_groups[0]["k"])


def test_what_an_optimizer_keeps_in_its_groups_is_left_there() -> None:
    assert run_ranks(count_three_steps, 2) == [3, 3]
