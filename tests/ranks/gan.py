"""A small WGAN-GP, in a loop of its own: two models, a gradient penalty, five steps to one."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import drivetrain
from drivetrain.cluster.environments import detect
from drivetrain.record import session
from drivetrain.train.keep_loop import KeptLoop
from tests.ranks.resuming import Interrupted

CRITIC_STEPS = 2


class Block(nn.Module):
    """Of which there are two: fsdp shards them one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.inner(x))


class Net(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.first = nn.Linear(before, 16)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.last = nn.Linear(16, after)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.last(x)
        return out


def points() -> TensorDataset:
    """22 of them: of an epoch's last batch, micro-batches have different sizes."""
    return TensorDataset(torch.randn(22, 2, generator=torch.Generator().manual_seed(1)) + 2)


def settings(folder: str, strategy: str, **more: Any) -> dict[str, Any]:
    return {
        "global_batch_size": 8,
        "micro_batch_size": 2,
        "max_steps": 5,
        "output_dir": folder,
        "parallel": {"strategy": strategy},
        "optimization": {"max_grad_norm": 5.0, "warmup_steps": 3},
        "record": {"progress": "none", "sinks": [], "logging_steps": 1},
        **more,
    }


def optimizers_of(models: Mapping[str, nn.Module]) -> dict[str, torch.optim.Optimizer]:
    return {
        name: torch.optim.Adam(model.parameters(), lr=1e-2, betas=(0.5, 0.9))
        for name, model in models.items()
    }


def copy_of(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


def made(folder: str, strategy: str, is_scheduled: bool = False, **more: Any) -> KeptLoop:
    """With a schedule of the critic's own it is stepped with it, the generator's rate stays."""
    torch.manual_seed(0)
    models = {"G": Net(4, 2), "D": Net(2, 1)}
    optimizers = optimizers_of(models)
    schedulers = (
        {"D": torch.optim.lr_scheduler.StepLR(optimizers["D"], 4)} if is_scheduled else None
    )
    chosen = settings(folder, strategy, **more)
    if is_scheduled:
        chosen["optimization"] = {"max_grad_norm": 5.0}
    return drivetrain.prepare(models, optimizers, points(), chosen, scheduler=schedulers)


def penalty(critic: nn.Module, real: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
    share = torch.rand(len(real), 1, device=real.device)
    between = (share * real + (1 - share) * fake).requires_grad_()
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    found: torch.Tensor = ((slope.norm(dim=1) - 1) ** 2).mean()
    return found


def critic_loss(loop: KeptLoop, real: torch.Tensor) -> Any:
    generator, critic = loop.model["G"], loop.model["D"]
    fake = generator(torch.randn(len(real), 4, device=real.device)).detach()
    slope = penalty(critic, real, fake)
    return critic(fake).mean() - critic(real).mean() + 10 * slope, {"penalty": slope}


def one_step(loop: KeptLoop, step: Any) -> None:
    for _ in range(CRITIC_STEPS):
        for (real,) in step:
            loop.backward(critic_loss(loop, real), "D")
        loop.step("D")
    if loop.step_number == 2:
        return  # the generator is not trained in every step
    for (real,) in step:
        noise = torch.randn(len(real), 4, device=real.device)
        loop.backward(-loop.model["D"](loop.model["G"](noise)).mean(), "G")
    loop.step("G")


def train(folder: str, strategy: str, stop_at: int = 0, **more: Any) -> list[list[float]]:
    """Each step's loss, its parts and the gradients' norm."""
    loop = made(folder, strategy, **more)
    for step in loop.steps():
        if stop_at and loop.step_number == stop_at:
            raise Interrupted
        one_step(loop, step)
    return [
        [step.loss, *step.parts.values(), float(step.grad_norm or 0.0)]
        for step in loop.history.steps
    ]


def train_and_resume(folder: str, strategy: str) -> tuple[list[list[float]], list[list[float]]]:
    """What an uninterrupted run finds, and one that is killed in its fourth step, from there on."""
    more: dict[str, Any] = {
        "is_scheduled": True,
        "checkpoint": {"every_steps": 2, "asynchronous": False},
    }
    whole = train(folder, strategy, **more)
    run_dir = Path(folder) / f"{strategy}-{detect().world_size}"
    os.environ[session.RUN_DIR], session._opened = str(run_dir), 0
    try:
        with contextlib.suppress(Interrupted):
            train(folder, strategy, stop_at=3, **more)
        session._opened = 0
        rest = train(folder, strategy, **more)
    finally:
        del os.environ[session.RUN_DIR]
    return whole, rest
