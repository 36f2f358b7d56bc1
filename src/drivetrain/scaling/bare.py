"""The bare engines for comparison, each used as in its own tutorial.

A `Run` runs steps and keeps each step's loss on this rank; timing is done elsewhere.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from drivetrain.cluster.environments import detect
from drivetrain.config.schema import Parallel
from drivetrain.parallel.accelerator import Accelerator
from drivetrain.parallel.world import join_world
from drivetrain.scaling.workload import Workload, loss_of


class Run:
    """A plain loop over a rank's batches."""

    def __init__(self, model: nn.Module, optimizer: Any, batches: Iterator[Any]) -> None:
        self._model, self._optimizer, self._batches = model, optimizer, batches
        self._losses: list[torch.Tensor] = []

    def __call__(self, num_steps: int) -> None:
        for _ in range(num_steps):
            batch = next(self._batches)
            self._optimizer.zero_grad()
            loss = loss_of(self._model, batch)
            loss.backward()
            self._optimizer.step()
            self._losses.append(loss.detach())

    def losses(self) -> list[float]:
        """Return each step's mean loss over ranks. A collective call."""
        mine = torch.stack(self._losses).double()
        if dist.get_world_size() > 1:
            dist.all_reduce(mine)
        means: list[float] = (mine / dist.get_world_size()).tolist()
        return means


def bare_run(strategy: str, workload: Workload, accelerator: Accelerator) -> Run:
    """Return a run of torch's engine for one of our strategies; on one rank, plain torch."""
    model = workload.model().to(accelerator.device)
    if workload.setting.num_ranks > 1:
        model = BARE_ENGINES[strategy](model)
    batches = workload.batches(dist.get_rank(), accelerator.device)
    return Run(model, workload.optimizer(model.parameters()), batches)


def _ddp(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)


def _fsdp2(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for layer in model.layers:  # type: ignore[union-attr]
        fully_shard(layer)
    fully_shard(model)
    return model


BARE_ENGINES: dict[str, Callable[[nn.Module], nn.Module]] = {"ddp": _ddp, "fsdp": _fsdp2}
"""How torch wraps a model, by the name of our strategy."""


def horovod_run(workload: Workload, accelerator: Accelerator) -> Run:
    """Return a run as in Horovod's guide, with the rendezvous of our Horovod strategy."""
    from drivetrain.strategies.horovod.rendezvous import start_horovod

    world = join_world(detect(), Parallel())
    local = world.identity.local_world_size
    here = min(local, world.identity.world_size - world.identity.node_rank * local)
    hvd: Any = start_horovod(
        replace(world, identity=replace(world.identity, local_world_size=here))
    )
    model = workload.model().to(accelerator.device)
    optimizer = hvd.DistributedOptimizer(
        workload.optimizer(model.parameters()), named_parameters=model.named_parameters()
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return Run(model, optimizer, workload.batches(dist.get_rank(), accelerator.device))


def leave_horovod() -> None:
    """Shut Horovod down, so the next size can start it again in the same processes."""
    from drivetrain.strategies.horovod.rendezvous import load_horovod

    load_horovod().shutdown()
    for name in [each for each in os.environ if each.startswith("HOROVOD_")]:
        del os.environ[name]
