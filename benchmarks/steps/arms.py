"""The same training as people write it on bare torch, Accelerate and Fabric, block by block.

Each function sets an arm up and returns `run(num_steps)`. All clip gradients and follow a cosine
schedule, as Drivetrain's arm does; none logs, which Drivetrain's does. Drivetrain's arm itself is
`Trainer.fit`, which hands over to the other arms at the end of each of its blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.steps.device import on_device, own_accelerator
from benchmarks.steps.workloads import LEARNING_RATE, MAX_GRAD_NORM, Workload

Run = Callable[[int], None]
TOTAL_STEPS = 1_000_000


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """The same for every arm."""
    parameters = list(model.parameters())
    # tensor parallelism leaves some whole, and torch's foreach kernels refuse the mixture
    is_mixed = len({type(parameter.data) for parameter in parameters}) > 1
    foreach = False if is_mixed else None
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.0, foreach=foreach)


def make_scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    """The same for every arm."""
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / TOTAL_STEPS))
    )


def _loader(workload: Workload) -> DataLoader[Any]:
    dataset, size, pin = workload.dataset(), workload.batch_size, not own_accelerator().is_cpu
    if not dist.is_initialized():
        return DataLoader(dataset, batch_size=size, shuffle=True, pin_memory=pin)
    sampler: DistributedSampler[Any] = DistributedSampler(dataset)
    return DataLoader(dataset, batch_size=size, sampler=sampler, pin_memory=pin)


def _endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def bare_loop(
    workload: Workload,
    model: nn.Module,
    batches: Iterator[Any] | None = None,
    clip: Callable[[], Any] | None = None,
) -> Run:
    """A loop as torch's tutorials have it; each rank with samples of its own unless told else."""
    optimizer = make_optimizer(model)
    scheduler = make_scheduler(optimizer)
    batches = on_device(batches or _endless(_loader(workload)))

    def run(num_steps: int) -> None:
        for _ in range(num_steps):
            batch = next(batches)
            optimizer.zero_grad()
            loss = workload.loss(model, batch)
            loss.backward()
            if clip is None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
            else:
                clip()
            optimizer.step()
            scheduler.step()

    return run


def bare(workload: Workload) -> Run:
    """One process: the model as it is."""
    return bare_loop(workload, workload.model().to(own_accelerator().device))


def bare_ddp(workload: Workload) -> Run:
    """torch.nn.parallel.DistributedDataParallel and nothing else."""
    model = workload.model().to(own_accelerator().device)
    return bare_loop(workload, DistributedDataParallel(model, gradient_as_bucket_view=True))


def bare_fsdp(workload: Workload) -> Run:
    """Torch's fully_shard and nothing else."""
    from torch.distributed.fsdp import fully_shard

    model = workload.model().to(own_accelerator().device)
    for layer in getattr(model, "layers", []):
        fully_shard(layer)
    fully_shard(model)
    return bare_loop(workload, model)


def accelerate(workload: Workload) -> Run:
    """Hugging Face Accelerate, as its quick tour has it."""
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs

    handler = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
    accelerator = Accelerator(cpu=own_accelerator().is_cpu, kwargs_handlers=[handler])
    plain = DataLoader(workload.dataset(), batch_size=workload.batch_size, shuffle=True)
    model = workload.model()
    optimizer = make_optimizer(model)
    model, optimizer, loader, scheduler = accelerator.prepare(
        model, optimizer, plain, make_scheduler(optimizer)
    )
    batches = _endless(loader)

    def run(num_steps: int) -> None:
        for _ in range(num_steps):
            batch = next(batches)
            optimizer.zero_grad()
            loss = workload.loss(model, batch)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
            optimizer.step()
            scheduler.step()

    return run


def fabric(workload: Workload) -> Run:
    """Lightning Fabric, as its documentation converts a loop."""
    from lightning.fabric import Fabric
    from lightning.fabric.strategies.ddp import DDPStrategy

    kind = own_accelerator().device.type
    if dist.is_initialized():
        strategy = DDPStrategy(gradient_as_bucket_view=True)
        lightning = Fabric(accelerator=kind, devices=dist.get_world_size(), strategy=strategy)
    else:
        lightning = Fabric(accelerator=kind, devices=1)
    lightning.launch()
    model = workload.model()
    model, optimizer = lightning.setup(model, make_optimizer(model))
    scheduler = make_scheduler(optimizer.optimizer)
    plain = DataLoader(workload.dataset(), batch_size=workload.batch_size, shuffle=True)
    batches = _endless(lightning.setup_dataloaders(plain))

    def run(num_steps: int) -> None:
        for _ in range(num_steps):
            batch = next(batches)
            optimizer.zero_grad()
            loss = workload.loss(model, batch)
            lightning.backward(loss)
            lightning.clip_gradients(model, optimizer, max_norm=MAX_GRAD_NORM)
            optimizer.step()
            scheduler.step()

    return run
