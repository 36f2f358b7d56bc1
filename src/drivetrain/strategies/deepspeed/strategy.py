"""deepspeed: ZeRO's three stages, and offload to host memory or a disk."""

from __future__ import annotations

import logging
import os
import warnings
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore

from drivetrain.cluster.description import Cluster
from drivetrain.config.schema import RunConfig
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.core.requirements import require
from drivetrain.parallel.layout import Layout
from drivetrain.parallel.model import NOTHING, EngineStep, ParallelModel
from drivetrain.parallel.world import World
from drivetrain.strategies.cost import Use
from drivetrain.strategies.deepspeed import DeepSpeed
from drivetrain.strategies.deepspeed.cost import COST
from drivetrain.strategies.deepspeed.offload import own_folder, require_async_io
from drivetrain.strategies.deepspeed.settings import OFFLOADS, Merged, merge
from drivetrain.strategies.deepspeed.shards import Shards
from drivetrain.strategies.strategy import Cost, Profile, Strategy, cost_now, memory_problems

# DeepSpeedModel: a model managed by DeepSpeed, behind the run's interface.
#
# The run decides which samples make up a step, how losses are weighted, the learning rate and when
# gradients are sent. DeepSpeed has the gradients, adds them up over ranks, clips them and steps the
# user's own torch optimizer on its shard.


class DeepSpeedModel(Shards, ParallelModel):
    """A model under ZeRO. DeepSpeed is initialized later, because it needs the optimizer."""

    needs_every_turn = True  # stages 2 and 3 reduce in every backward, 1 in the last

    def __init__(self, model: nn.Module, world: World, settings: dict[str, Any]) -> None:
        super().__init__(model, world, int(settings["zero_optimization"]["stage"]))
        self.module = model
        self.evaluated: Any = self.inner
        self.counts = True
        self.loss_multiplier = float(world.layout.dp)  # DeepSpeed divides by the number of ranks
        self.forwards_in_lockstep = self.stage == 3
        self.engine_step: EngineStep | None = self
        self._settings = settings

    def take_over(self, optimizer: torch.optim.Optimizer) -> None:
        """Let DeepSpeed shard the model and the optimizer's state."""
        deepspeed = load_deepspeed(self.world)
        config = self._on_own_folder()
        if self.stage == 3:
            # Shards weights one by one from the host: DeepSpeed's engine would first move all of
            # them to the device. Not earlier, because creating an optimizer may need their shapes.
            deepspeed.zero.Init(module=self.inner, config_dict_or_path=config, dtype=torch.float32)
        engine, zero, _, _ = deepspeed.initialize(
            model=self.inner,
            optimizer=optimizer,
            config=config,
            dist_init_required=False,
        )
        if zero.optimizer is not optimizer:
            raise _replaced(optimizer)
        self.engine, self.zero, self.module = engine, zero, engine

    def _on_own_folder(self) -> dict[str, Any]:
        """Return the settings, with a directory for this process only on each offload disk."""
        zero = dict(self._settings["zero_optimization"])
        on_disk = [what for what in OFFLOADS if zero.get(what, {}).get("device") == "nvme"]
        if on_disk:
            require_async_io()
        for what in on_disk:
            folder = own_folder(Path(zero[what]["nvme_path"]), self)
            zero[what] = {**zero[what], "nvme_path": str(folder)}
        return {**self._settings, "zero_optimization": zero}

    def micro_batch(self, index: int, *, is_last: bool) -> AbstractContextManager[None]:
        """Tell DeepSpeed where the step ends: its own count is wrong with empty micro-batches."""
        self.engine.set_gradient_accumulation_boundary(is_last)
        return NOTHING

    def backward(self, loss: torch.Tensor) -> None:
        """Run backward without scaling: the loss is already weighted."""
        self.engine.backward(loss, scale_wrt_gas=False)

    def finish_gradients(self) -> None:
        """Do nothing: DeepSpeed has finished them at the end of the last backward."""

    def step(self, correction: torch.Tensor | None) -> torch.Tensor:
        """Clip and step; return the gradient norm.

        A correction is a loss scale that is known only after backward. DeepSpeed divides gradients
        and their norm by the loss scale before it clips, which is what is needed when losses are
        weighted by a count other than the number of samples.
        """
        if correction is not None:
            self.zero.override_loss_scale(1.0 / float(correction))
        self.engine.step()
        if correction is not None:
            self.zero.override_loss_scale(1.0)  # it must not scale the next losses
        return torch.as_tensor(self.engine.get_global_grad_norm(), dtype=torch.float32)

    def total_norm(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """Not used: DeepSpeed has the gradients."""
        return torch.nn.utils.get_total_norm(gradients)

    def local(self, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """Not used: DeepSpeed has the gradients."""
        return gradients


def load_deepspeed(world: World) -> ModuleType:
    """Import DeepSpeed without its log output, and use the existing process group."""
    os.environ.setdefault("DS_ACCELERATOR", world.device.type)  # or it looks for a GPU
    deepspeed = require("deepspeed", extra="deepspeed")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # it uses deprecated names of torch's collectives, which users can do nothing about
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    # Shared-memory collectives for inference on CPUs would be compiled at the first start, and
    # their buffers would stay in shared memory afterwards. Training does not use them.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    os.environ.setdefault("LOCAL_RANK", str(world.identity.local_rank))
    if not dist.is_initialized():  # a single rank, for example with offload
        store = HashStore()
        dist.init_process_group(world.accelerator.backend, store=store, rank=0, world_size=1)
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
    return deepspeed


def _replaced(optimizer: torch.optim.Optimizer) -> ConfigError:
    return ConfigError(
        [
            Problem(
                "optimizer",
                "DeepSpeed replaces it with its own, which the schedule cannot reach",
                "use another optimizer, or parallel.strategy=fsdp",
                type(optimizer).__name__,
            )
        ]
    )


def make(config: RunConfig, micro_batch_blocks: list[range]) -> Strategy:
    """Return the strategy, with the largest number of micro-batches that a rank has per step."""
    return DeepSpeedStrategy(config, accumulation=max(map(len, micro_batch_blocks)))


class DeepSpeedStrategy(Strategy):
    """Sharded data parallelism by DeepSpeed's ZeRO."""

    def __init__(self, config: RunConfig, accumulation: int) -> None:
        self._config = config
        self._accumulation = accumulation

    def problems(self, profile: Profile, layout: Layout, cluster: Cluster) -> list[Problem]:
        """Check that the user's file agrees with the run, weights are fp32 and shards fit."""
        found = list(self._merged(profile).problems)
        if profile.dtypes - {"float32"}:
            names = ", ".join(sorted(profile.dtypes))
            found.append(
                Problem(
                    "parallel.strategy",
                    f"requires fp32 weights, and the model has {names}",
                    "create the model in fp32 (precision.dtype sets the compute precision)",
                    "deepspeed",
                )
            )
        if found:
            return found
        remedy = "use a higher zero_stage, offload, or more ranks"
        return memory_problems(self.cost(profile, layout, cluster), cluster, remedy)

    def cost(self, profile: Profile, layout: Layout, cluster: Cluster) -> Cost:
        """Return the cost of this stage on the device, without what is offloaded."""
        merged = self._merged(profile)
        options = DeepSpeed.model_construct(zero_stage=merged.stage)
        offload = "none" if merged.offload("offload_optimizer") == "none" else "cpu"
        use = Use(layout, options, profile.micro_batches_per_step, offload=offload)
        cost = cost_now(COST, profile, use)
        keeps_weights = merged.offload("offload_param") == "none"
        return cost if keeps_weights else replace(cost, parameter_bytes=0)

    def apply(self, model: nn.Module, world: World) -> ParallelModel:
        """Return the model, not yet sharded: DeepSpeed also needs the optimizer (`take_over`)."""
        merged = self._merged(Profile.of(model))
        if merged.stage == 3:  # the full model need not fit: DeepSpeed moves weights one by one
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
