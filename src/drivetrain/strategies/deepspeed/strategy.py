"""deepspeed: ZeRO's three stages, and offload to host memory or a disk."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from drivetrain.cluster.description import Cluster
from drivetrain.config.schema import RunConfig
from drivetrain.core.errors import Problem
from drivetrain.parallel.layout import Layout
from drivetrain.parallel.model import ParallelModel
from drivetrain.parallel.world import World
from drivetrain.strategies.cost import Use
from drivetrain.strategies.deepspeed import DeepSpeed
from drivetrain.strategies.deepspeed.cost import COST
from drivetrain.strategies.deepspeed.model import DeepSpeedModel
from drivetrain.strategies.deepspeed.settings import Merged, merge
from drivetrain.strategies.strategy import Cost, Profile, Strategy, cost_now, memory_problems


def make(config: RunConfig, micro_batch_blocks: list[range]) -> Strategy:
    """ZeRO is told how many micro-batches a step has."""
    return DeepSpeedStrategy(config, accumulation=max(map(len, micro_batch_blocks)))


class DeepSpeedStrategy(Strategy):
    """DeepSpeed's ZeRO."""

    def __init__(self, config: RunConfig, accumulation: int) -> None:
        self._config = config
        self._accumulation = accumulation

    def problems(self, profile: Profile, layout: Layout, cluster: Cluster) -> list[Problem]:
        """The user's file must agree with the run, the weights be fp32, and the shards fit."""
        found = list(self._merged(profile).problems)
        if profile.dtypes - {"float32"}:
            names = ", ".join(sorted(profile.dtypes))
            found.append(
                Problem(
                    "parallel.strategy",
                    f"ZeRO here keeps fp32 weights, and the model has {names}",
                    "make the model in fp32 (precision.dtype sets what it computes in)",
                    "deepspeed",
                )
            )
        if found:
            return found
        remedy = "use a higher zero_stage, offload, or more ranks"
        return memory_problems(self.cost(profile, layout, cluster), cluster, remedy)

    def cost(self, profile: Profile, layout: Layout, cluster: Cluster) -> Cost:
        """Per stage, what is in shards; what is offloaded is not on the device."""
        merged = self._merged(profile)
        options = DeepSpeed.model_construct(zero_stage=merged.stage)
        offload = "none" if merged.offload("offload_optimizer") == "none" else "cpu"
        use = Use(layout, options, profile.micro_batches_per_step, offload=offload)
        cost = cost_now(COST, profile, use)
        keeps_weights = merged.offload("offload_param") == "none"
        return cost if keeps_weights else replace(cost, parameter_bytes=0)

    def apply(self, model: nn.Module, world: World) -> ParallelModel:
        """Not yet sharded: DeepSpeed wants the optimizer too, which comes next."""
        merged = self._merged(Profile.of(model))
        if merged.stage == 3:  # the whole need not fit: DeepSpeed takes one weight after the other
            _move_buffers(model, world.device)
        else:
            model.to(world.device)
        return DeepSpeedModel(model, world, merged.settings)

    def _merged(self, profile: Profile) -> Merged:
        return merge(self._config, self._accumulation, profile)


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
