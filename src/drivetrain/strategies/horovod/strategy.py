"""horovod: a full copy of the model per rank; gradients are summed by Horovod while backward runs.

Horovod is used only to sum gradients. The run itself selects samples, clips and steps the
optimizer, as with ddp, so a run gives the same results under both.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import torch
from torch import nn

from drivetrain.cluster.description import Cluster
from drivetrain.config.schema import RunConfig
from drivetrain.core.errors import Problem
from drivetrain.parallel.layout import Layout
from drivetrain.parallel.model import NOTHING, ParallelModel
from drivetrain.parallel.world import World
from drivetrain.strategies.cost import Use
from drivetrain.strategies.horovod import Horovod
from drivetrain.strategies.horovod.cost import COST
from drivetrain.strategies.horovod.rendezvous import load_horovod, start_horovod
from drivetrain.strategies.single import SingleModel
from drivetrain.strategies.strategy import Cost, Profile, Strategy, cost_now, memory_problems


def make(config: RunConfig, micro_batch_blocks: list[range]) -> Strategy:
    return HorovodStrategy(config.parallel.details(Horovod))


class HorovodStrategy(Strategy):
    """Data parallelism with Horovod's ring all-reduce."""

    def __init__(self, config: Horovod) -> None:
        self._config = config

    def problems(self, profile: Profile, layout: Layout, cluster: Cluster) -> list[Problem]:
        """Check that Horovod is installed and that a full copy fits on a device."""
        load_horovod()
        remedy = "use parallel.strategy=fsdp, which shards them"
        return memory_problems(self.cost(profile, layout, cluster), cluster, remedy)

    def cost(self, profile: Profile, layout: Layout, cluster: Cluster) -> Cost:
        """Return the cost of a full copy; fp16 compression halves the bytes sent."""
        use = Use(layout, self._config, profile.micro_batches_per_step)
        return cost_now(COST, profile, use)

    def apply(self, model: nn.Module, world: World) -> ParallelModel:
        """Leave the model unchanged, and register hooks on its gradients."""
        model.to(world.device)
        if world.layout.dp == 1:
            return SingleModel(model)
        return HorovodModel(model, start_horovod(world), self._config.compression)


class HorovodModel(SingleModel):
    """A full model per rank; each gradient is sent as soon as it is complete."""

    can_replay = False

    needs_every_turn = True

    def __init__(self, model: nn.Module, hvd: ModuleType, compression: str) -> None:
        super().__init__(model)
        self._hvd = hvd
        self._compression = getattr(hvd.Compression, compression)
        self._names = {p: name for name, p in model.named_parameters() if p.requires_grad}
        self._under_way: dict[nn.Parameter, tuple[int, Any]] = {}
        self._sends = False
        for parameter in self._names:
            parameter.register_post_accumulate_grad_hook(self._gradient_came_in)

    def micro_batch(self, index: int, *, is_last: bool) -> AbstractContextManager[None]:
        """Send gradients in the last micro-batch only: before, they are not complete."""
        self._sends = is_last
        return NOTHING

    def finish_gradients(self) -> None:
        """Wait for the sums."""
        missing = [name for p, name in self._names.items() if p not in self._under_way]
        if missing:
            # Horovod would send zeros, and the optimizer would update weights that a single process
            # leaves unchanged
            raise RuntimeError(
                f"{missing[0]} and {len(missing) - 1} more were not used in this step; use "
                "parallel.strategy=ddp with parallel.ddp.find_unused_parameters=true"
            )
        for parameter, (handle, context) in self._under_way.items():
            summed = self._hvd.synchronize(handle)
            parameter.grad = self._compression.decompress(summed, context)
        self._under_way = {}

    def _gradient_came_in(self, parameter: torch.Tensor) -> None:
        if not self._sends or not isinstance(parameter, nn.Parameter):
            return
        packed, context = self._compression.compress(parameter.grad)
        name = self._names[parameter]
        # Sum: losses are already divided by the global batch
        handle = self._hvd.allreduce_async_(packed, name=name, op=self._hvd.Sum)
        self._under_way[parameter] = (handle, context)
