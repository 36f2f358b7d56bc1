"""deepspeed: ZeRO's three stages, and offload to host memory or a disk."""

from __future__ import annotations

import torch
from torch import nn

from drivetrain.cluster.description import Cluster
from drivetrain.config.schema import RunConfig
from drivetrain.core.errors import Problem
from drivetrain.parallel.deepspeed.settings import Merged, merge
from drivetrain.parallel.deepspeed.spread import Zero
from drivetrain.parallel.layout import Layout
from drivetrain.parallel.strategy import Cost, Profile, Spread, memory_problems
from drivetrain.parallel.world import World


class DeepSpeedStrategy:
    """DeepSpeed's ZeRO."""

    name = "deepspeed"

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

    def cost(self, profile: Profile, layout: Layout, cluster: Cluster) -> Cost:  # noqa: ARG002
        """Per stage, what is in shards; what is offloaded is not on the device."""
        merged, ranks = self._merged(profile), layout.dp
        stage = merged.stage
        weights = profile.parameter_bytes // (ranks if stage == 3 else 1)
        gradients = profile.gradient_bytes // (ranks if stage >= 2 else 1)
        # ZeRO steps on a second copy of the weights' shard, beside the optimizer's own numbers
        optimizer = (profile.optimizer_bytes + profile.gradient_bytes) // ranks
        # stage 1 all-reduces once a step, 2 every micro-batch; 3 reduce-scatters, half as much
        turns = profile.micro_batches_per_step
        reduced = profile.gradient_bytes * {1: 2, 2: 2 * turns, 3: turns}[stage]
        gathered = profile.parameter_bytes * (2 * turns if stage == 3 else 1)
        return Cost(
            0 if merged.offload("offload_param") != "none" else weights,
            gradients,
            0 if merged.offload("offload_optimizer") != "none" else optimizer,
            (reduced + gathered) * (ranks - 1) // ranks,
        )

    def apply(self, model: nn.Module, world: World) -> Spread:
        """Not yet sharded: DeepSpeed wants the optimizer too, which comes next."""
        merged = self._merged(Profile.of(model))
        if merged.stage == 3:  # the whole need not fit: DeepSpeed takes one weight after the other
            _move_buffers(model, world.device)
        else:
            model.to(world.device)
        return Zero(model, world, merged.settings)

    def _merged(self, profile: Profile) -> Merged:
        return merge(self._config, self._accumulation, profile)


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
