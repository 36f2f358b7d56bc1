"""Tensor parallelism and a pipeline as people write them on bare torch, block by block."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader

from benchmarks.steps.arms import Run, bare_loop, make_optimizer, make_scheduler
from benchmarks.steps.device import on_device, own_accelerator
from benchmarks.steps.workloads import MAX_GRAD_NORM, Workload
from drivetrain.parallel.parts import total_norm

NUM_MICRO_BATCHES = 4


def same_batches(workload: Workload, num_micro_batches: int = 1) -> Iterator[Any]:
    """The same samples on every rank, without end."""
    generator = torch.Generator().manual_seed(0)
    size = workload.batch_size * num_micro_batches
    loader: DataLoader[Any] = DataLoader(
        workload.dataset(), batch_size=size, shuffle=True, generator=generator, drop_last=True
    )
    while True:
        yield from loader


def bare_tp(workload: Workload) -> Run:
    """parallelize_module on the two large layers of each block."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    torch.manual_seed(0)
    device = own_accelerator().device
    model = workload.model().to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model.get_submodule("layers").children():
        plan = {"linear1": ColwiseParallel(), "linear2": RowwiseParallel()}
        parallelize_module(layer, mesh, plan)

    def clip() -> None:
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        _scale(gradients, total_norm(gradients))

    return bare_loop(workload, model, same_batches(workload), clip)


class _Half(nn.Module):
    """Half of the workload's model."""

    def __init__(self, whole: nn.Module, stage: int, num_stages: int) -> None:
        super().__init__()
        layers = list(whole.get_submodule("layers").children())
        per_stage = len(layers) // num_stages
        self.embed = whole.get_submodule("embed") if stage == 0 else nn.Identity()
        self.layers = nn.ModuleList(layers[stage * per_stage : (stage + 1) * per_stage])
        self.head = whole.get_submodule("head") if stage == num_stages - 1 else nn.Identity()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """From tokens or the hidden state to the hidden state or logits."""
        hidden = self.embed(hidden)
        for layer in self.layers:
            hidden = layer(hidden)
        out: torch.Tensor = self.head(hidden)
        return out


def bare_pp(workload: Workload) -> Run:
    """PipelineStage and Schedule1F1B, one stage per rank."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    from torch.nn import functional as F

    torch.manual_seed(0)
    rank, size = dist.get_rank(), dist.get_world_size()
    device = own_accelerator().device
    model = _Half(workload.model(), rank, size).to(device)
    stage = PipelineStage(model, rank, size, device)

    def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten())

    schedule = Schedule1F1B(stage, NUM_MICRO_BATCHES, loss_fn=loss)
    optimizer = make_optimizer(model)
    scheduler = make_scheduler(optimizer)
    batches = on_device(same_batches(workload, NUM_MICRO_BATCHES))

    def run(num_steps: int) -> None:
        for _ in range(num_steps):
            inputs, targets = next(batches)
            optimizer.zero_grad()
            first = (inputs,) if rank == 0 else ()
            schedule.step(*first, target=targets, return_outputs=False)
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            squared = torch.nn.utils.get_total_norm(gradients) ** 2
            dist.all_reduce(squared)
            _scale(gradients, squared.sqrt())
            optimizer.step()
            scheduler.step()

    return run


def _scale(gradients: list[torch.Tensor], norm: torch.Tensor) -> None:
    clip = torch.clamp(MAX_GRAD_NORM / (norm + 1e-6), max=1.0)
    for gradient in gradients:
        gradient.mul_(clip)
