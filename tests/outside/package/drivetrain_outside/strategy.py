"""How flat is done."""

from __future__ import annotations

import torch
from torch import nn

from drivetrain.cluster.description import Cluster
from drivetrain.config.schema import RunConfig
from drivetrain.core.errors import Problem
from drivetrain.parallel.layout import Layout
from drivetrain.parallel.model import ParallelModel
from drivetrain.parallel.world import World
from drivetrain.strategies.cost import Use
from drivetrain.strategies.single import SingleModel
from drivetrain.strategies.strategy import Cost, Profile, Strategy, cost_now, memory_problems
from drivetrain_outside import Flat
from drivetrain_outside.cost import COST

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def make(config: RunConfig, micro_batch_blocks: list[range]) -> Strategy:
    return FlatStrategy(config.parallel.details(Flat))


class FlatStrategy(Strategy):
    def __init__(self, settings: Flat) -> None:
        self._settings = settings

    def problems(self, profile: Profile, layout: Layout, cluster: Cluster) -> list[Problem]:
        cost = self.cost(profile, layout, cluster)
        return memory_problems(cost, cluster, "use a strategy that shards")

    def cost(self, profile: Profile, layout: Layout, cluster: Cluster) -> Cost:
        use = Use(layout, self._settings, profile.micro_batches_per_step)
        return cost_now(COST, profile, use)

    def apply(self, model: nn.Module, world: World) -> ParallelModel:
        model.to(world.device)
        world.share_weights(model)
        return FlatModel(model, world, DTYPES[self._settings.wire_dtype])


class FlatModel(SingleModel):
    """Losses are divided by the global batch already: gradients need only be summed."""

    def __init__(self, model: nn.Module, world: World, wire_dtype: torch.dtype) -> None:
        super().__init__(model)
        self._world, self._wire_dtype = world, wire_dtype
        self._trained = [p for p in model.parameters() if p.requires_grad]

    def finish_gradients(self) -> None:
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._trained]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        summed = self._world.sum(flat.to(self._wire_dtype)).to(flat.dtype)
        pieces = summed.split([p.numel() for p in self._trained])
        for parameter, piece in zip(self._trained, pieces, strict=True):
            parameter.grad = piece.view_as(parameter)
