"""fsdp: weights, gradients and optimizer state in shards (FSDP2 `fully_shard`).

With `dp_replicate` copies of `dp_shard` shards this is HSDP: weights are gathered within a copy;
gradients are reduced within it and then averaged over the copies.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from drivetrain.cluster.description import Cluster
from drivetrain.config.schema import RunConfig
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.parallel.clock import Waiting
from drivetrain.parallel.layout import Layout
from drivetrain.parallel.model import COMPUTE_DTYPES, NOTHING, ParallelModel
from drivetrain.parallel.parts import local_parts, total_norm
from drivetrain.parallel.several_models import backward_to
from drivetrain.parallel.world import World
from drivetrain.strategies.cost import Use
from drivetrain.strategies.fsdp import FSDP
from drivetrain.strategies.fsdp.cost import COST
from drivetrain.strategies.fsdp.experts import shard_experts
from drivetrain.strategies.fsdp.internals import gathered_weights, reduce_now, watch
from drivetrain.strategies.fsdp.units import notes_of, units
from drivetrain.strategies.single import SingleModel, SingleOfSeveral
from drivetrain.strategies.strategy import Cost, Profile, Strategy, cost_now, memory_problems


def make(config: RunConfig, micro_batch_blocks: list[range]) -> Strategy:
    """Return the strategy, with the run's precision and offload."""
    return FSDPStrategy(
        config.parallel.details(FSDP),
        COMPUTE_DTYPES[config.precision.dtype],
        offload=config.memory.offload == "cpu",
    )


class FSDPStrategy(Strategy):
    """Sharded data parallelism with torch's FSDP2."""

    def __init__(
        self, config: FSDP, compute_dtype: torch.dtype | None = None, *, offload: bool = False
    ) -> None:
        self._config = config
        self._compute_dtype = compute_dtype
        self._offload = offload

    def problems(self, profile: Profile, layout: Layout, cluster: Cluster) -> list[Problem]:
        """Check that there are ranks to shard over and that the shards fit."""
        if layout.dp_shard * layout.cp == 1 and layout.dp > 1:
            return [
                Problem(
                    "parallel.dp_shard",
                    "fsdp has nothing to shard over",
                    "give dp_shard at least 2 ranks, or use parallel.strategy=ddp",
                    layout.dp_shard,
                )
            ]
        return memory_problems(self.cost(profile, layout, cluster), cluster, "use more ranks")

    def cost(self, profile: Profile, layout: Layout, cluster: Cluster) -> Cost:
        """Return the cost: a shard of everything, and a gather of the weights per micro-batch."""
        use = Use(
            layout,
            self._config,
            profile.micro_batches_per_step,
            "fp32" if self._compute_dtype is None else "half",
            "cpu" if self._offload else "none",
        )
        return cost_now(COST, profile, use)

    def notes(self, model: nn.Module, world: World) -> list[str]:
        """Return notes about blocks that are not sharded separately."""
        return notes_of(model, self._config.shard_modules) if world.layout.dp > 1 else []

    def shards_on(self, world: World) -> torch.device | None:
        """Return the device for shards: FSDP2 also shards weights on the meta device."""
        if world.data_mesh is None:
            return None
        return torch.device("cpu") if self._offload else world.device

    def apply(self, model: nn.Module, world: World) -> ParallelModel:
        """Shard the blocks, then the rest with the root."""
        mesh = world.data_mesh
        if mesh is None:
            return SingleModel(model.to(world.device), counts=world.speaks_for_samples)
        self._shard(model, world, mesh)
        return FSDPModel(
            model,
            mesh,
            counts=world.speaks_for_samples,
            reduces_every_micro_batch=self._config.reduce_every_micro_batch,
        )

    def apply_beside_others(self, model: nn.Module, world: World) -> ParallelModel:
        """Like `apply`; weights stay gathered until their optimizer steps."""
        if self._offload:
            rule = "not supported with several models"
            raise ConfigError([Problem("memory.offload", rule, "use none", "cpu")])
        mesh = world.data_mesh
        if mesh is None:
            return SingleOfSeveral(model.to(world.device), counts=world.speaks_for_samples)
        self._shard(model, world, mesh)
        return FSDPOfSeveral(model, mesh, counts=world.speaks_for_samples)

    def _shard(self, model: nn.Module, world: World, mesh: DeviceMesh) -> None:
        # torch warns of every model that ends in a Linear, whose output is a view of a matrix: only
        # changing it in place can do harm, and then backward fails, which is explained there
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view", UserWarning)
        policy = MixedPrecisionPolicy(
            param_dtype=self._compute_dtype,
            reduce_dtype=torch.float32 if self._compute_dtype else None,
        )
        said = self._config.reshard_after_forward
        reshard = None if said == "auto" else said
        if world.expert_mesh is not None:
            shard_experts(model, world.expert_mesh, mesh.size(), policy, reshard)
        can_pin = not world.accelerator.is_cpu
        for module in (*units(model, self._config.shard_modules), model):
            fully_shard(
                module,
                mesh=mesh,
                mp_policy=policy,
                offload_policy=CPUOffloadPolicy(pin_memory=can_pin)
                if self._offload
                else OffloadPolicy(),
                reshard_after_forward=reshard,
            )


_KEEPS = "keeps references to its original weights, which fsdp has replaced with shards"
_READ_THEM = "use parallel.strategy=ddp, or read weights from their modules in forward"


def not_reached(model: nn.Module) -> str:
    """Return a sentence that names weights without gradients; ConfigError if none has one.

    `fully_shard` gives a module new parameters. A model that keeps references to the old ones, as
    Keras models do, would continue to use those and train nothing.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    missing = [name for name, parameter in trained.items() if parameter.grad is None]
    if not missing:
        return ""
    if len(missing) == len(trained):
        kind = type(model).__name__.removeprefix("FSDP")
        rule = f"no weight of {kind} got a gradient: it {_KEEPS} (as Keras models do)"
        raise ConfigError([Problem("parallel.strategy", rule, _READ_THEM, "fsdp")])
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    return f"fsdp: the first step's loss does not depend on {missing[0]}{more}: not trained"


class _Explained(AbstractContextManager[None]):
    """Explain torch's error when a part of the model was called without the model itself."""

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, RuntimeError) and "mixed torch.Tensor and DTensor" in str(error):
            error.add_note(
                "under fsdp a model's weights are gathered when the model is called: call "
                "model(batch), not a submodule or a method of it; or register the method with "
                "torch in a hook's on_setup: torch.distributed.fsdp.register_fsdp_forward_method"
                '(trainer.model, "method")'
            )
        elif isinstance(error, RuntimeError) and "device meta" in str(error):
            error.add_note(f"the model {_KEEPS}; {_READ_THEM}")


EXPLAINED = _Explained()

_CHANGED_IN_PLACE = (
    "under fsdp, the output of a model or block must not be changed in place (x += y, x.mul_(y)), "
    "or backward does not gather its weights: use x = x + y"
)


class FSDPModel(ParallelModel):
    """A model whose weights are DTensors."""

    forwards_in_lockstep = True
    needs_every_turn = True
    can_replay = True
    reduces_in_backward = True
    syncs_stages = True

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        *,
        counts: bool = True,
        reduces_every_micro_batch: bool = False,
    ) -> None:
        if not isinstance(model, FSDPModule):
            raise TypeError("fully_shard() did not make the model an FSDPModule")
        self.module: nn.Module = model
        self.inner: nn.Module = model
        self.evaluated: Any = model
        self.counts = counts
        self.loss_multiplier = float(mesh.size())  # FSDP2 divides by the number of ranks
        self.reduces_every_micro_batch = reduces_every_micro_batch
        self._root: FSDPModule = model
        self._is_last = True
        self._is_first = True

    def micro_batch(self, index: int, *, is_last: bool) -> AbstractContextManager[None]:
        """Set whether backward reduces gradients: in the last micro-batch or in each."""
        if is_last is not self._is_last:
            self._is_last = is_last
            sync_gradients(self._root, is_last=is_last, every=self.reduces_every_micro_batch)
        return EXPLAINED

    def backward(self, loss: torch.Tensor) -> None:
        try:
            super().backward(loss)
        except RuntimeError as error:
            if "storage of size 0" in str(error):
                error.add_note(_CHANGED_IN_PLACE)
            raise

    def gradient_leaves(self) -> dict[str, torch.Tensor]:
        """Return the gathered weights: backward's gradients of them are then reduced to shards."""
        return gathered_weights(self.inner)

    def finish_gradients(self) -> None:
        """Check in the first step that weights have gradients. FSDP2 has finished them."""
        if self._is_first:
            self._is_first = False
            if (said := not_reached(self.inner)) and dist.get_rank() == 0:
                warnings.warn(said, stacklevel=2)

    def total_norm(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """Return the norm over all shards."""
        return total_norm(gradients)

    def local(self, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return this rank's shards."""
        return local_parts(gradients)

    def weights_change(self) -> None:
        """Free weights that a forward left gathered: the next forward would reuse them."""
        for module in self.inner.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def watch_waits(self, waiting: Waiting) -> None:
        watch(self.inner, waiting)

    def sync_stage(self, modules: Sequence[nn.Module], *, is_last: bool) -> None:
        """Set whether the next backward reduces gradients of those modules that are sharded."""
        every = self.reduces_every_micro_batch
        for module in modules:
            # a block's experts are sharded separately; the root's blocks may be in other stages
            parts = [module] if module is self.inner else module.modules()
            for part in parts:
                if isinstance(part, FSDPModule):
                    sync_gradients(part, is_last=is_last, every=every, recurse=False)


class FSDPOfSeveral(FSDPModel):
    """One of several models: gathered from its first forward to its optimizer's step.

    A gradient penalty runs backward twice through one forward, and a generator's loss runs backward
    through the critic. FSDP's hooks treat every such backward as the model's own and would free
    weights that are still needed. Here they reduce nothing; `finish_gradients` does so once.
    """

    can_replay = False

    def __init__(self, model: nn.Module, mesh: DeviceMesh, *, counts: bool) -> None:
        super().__init__(model, mesh, counts=counts)
        self._root.set_reshard_after_forward(False)
        self._root.set_reshard_after_backward(False)
        self._root.set_requires_gradient_sync(False)

    def micro_batch(self, index: int, *, is_last: bool) -> AbstractContextManager[None]:
        """Do nothing: gradients are reduced in `finish_gradients`."""
        return NOTHING

    def backward(self, loss: torch.Tensor) -> None:
        """Add gradients to this model's own weights, in their gathered form."""
        backward_to(self.inner, loss)

    def finish_gradients(self) -> None:
        """Reduce gradients to shards and free the gathered weights, which are about to change."""
        self._root.set_requires_gradient_sync(True)
        reduce_now(self.inner)
        self._root.set_requires_gradient_sync(False)
        self.weights_change()


def sync_gradients(module: FSDPModule, *, is_last: bool, every: bool, recurse: bool = True) -> None:
    """Set whether the next backward reduces gradients or keeps them unsharded.

    With `every`, each micro-batch reduces them to shards; copies of shards (HSDP) are added up in
    the last one.
    """
    module.set_requires_gradient_sync(is_last or every, recurse=recurse)
    if every:
        module.set_requires_all_reduce(is_last, recurse=recurse)
