"""What ZeRO has cut up, under the user's names and back again.

A parameter is put together on all ranks, one at a time, and each keeps its slice along dim 0: so a
checkpoint is written by all ranks at once, in the same form as fsdp's, and any layout can load it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from drivetrain.core.errors import ConfigError, Problem
from drivetrain.core.requirements import require
from drivetrain.parallel.parts import whole
from drivetrain.parallel.world import World
from drivetrain.strategies.deepspeed.flat_groups import FlatGroups

Tensors = dict[str, torch.Tensor]


class Shards:
    """A model whose weights, or optimizer state, DeepSpeed has spread over the ranks."""

    engine: Any
    """DeepSpeed's engine."""
    zero: Any
    """DeepSpeed's optimizer, around the user's own."""

    def __init__(self, model: nn.Module, world: World, stage: int) -> None:
        self.inner = model
        self.world = world
        self.stage = stage

    def full_state(self) -> dict[str, Any]:
        """Whole tensors on rank 0's CPU; each is only there while it is copied."""
        whole = {}
        for name, tensor in self._named_tensors():
            with self._gathered([tensor]):
                if self.world.is_main:
                    whole[name] = tensor.detach().cpu().clone()
        return whole

    def model_state(self) -> Tensors:
        """Each weight's slice; buffers as they are."""
        slices = {}
        for name, tensor in self._named_tensors():
            if isinstance(tensor, nn.Parameter):
                with self._gathered([tensor]):
                    slices[name] = self._slice(tensor.detach())
            else:
                slices[name] = tensor.detach()
        return slices

    def optimizer_state(self, *, make: bool = False) -> dict[str, Any]:
        """Slices of what is kept for each element, and what a group has in common."""
        flat = FlatGroups.of(self.zero, self.stage)
        if make:
            flat.make_state()
        state: dict[str, Any] = {}
        for group, members in flat.by_group(self._trained()).items():
            with flat.at_hand(group):
                keys, common = flat.keys_per_element(group), flat.common(group)
                for name, parameter in members:
                    for key in keys:
                        state[f"{name}.{key}"] = self._slice(flat.get(parameter, key))
                    for key, value in common.items():
                        is_tensor = isinstance(value, torch.Tensor)
                        state[f"{name}.{key}"] = value.clone() if is_tensor else value
        return state

    def put_back(self, model: Mapping[str, torch.Tensor], optimizer: Mapping[str, Any]) -> None:
        """Weights first: DeepSpeed takes its own copy of them from the model's."""
        for name, tensor in self._named_tensors():
            full = whole(model[name])
            with torch.no_grad(), self._gathered([tensor], will_change=True):
                tensor.copy_(full)
        flat = FlatGroups.of(self.zero, self.stage)
        flat.refresh_weights()
        for group, members in flat.by_group(self._trained()).items():
            with flat.at_hand(group, will_change=True):
                for name, parameter in members:
                    for key in flat.keys_per_element(group):
                        if (value := optimizer.get(f"{name}.{key}")) is not None:
                            flat.set(parameter, key, whole(value))
            names = [name for name, _ in members]
            flat.set_common(group, _agreed(names, list(flat.common(group)), optimizer))

    def _named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, value in self.inner.state_dict(keep_vars=True).items():
            if isinstance(value, torch.Tensor):
                yield name, value

    def _trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in self.inner.named_parameters():
            if parameter.requires_grad:
                yield name, parameter

    def _gathered(
        self, tensors: Iterable[torch.Tensor], *, will_change: bool = False
    ) -> AbstractContextManager[None]:
        """Stage 3 keeps weights in pieces; whole in here."""
        if self.stage != 3:
            return nullcontext()
        deepspeed = require("deepspeed", extra="deepspeed")
        changes = 0 if will_change else None
        return cast(
            AbstractContextManager[None],
            deepspeed.zero.GatheredParameters(list(tensors), modifier_rank=changes),
        )

    def _slice(self, whole: torch.Tensor) -> torch.Tensor:
        mesh = self.world.mesh
        if mesh is None or whole.ndim == 0:
            return whole.clone()
        axes = [Replicate()] * (mesh.ndim - 1)
        # None: every rank has the whole, so nothing is sent; a copy, or the whole would stay
        cut = distribute_tensor(whole, mesh, [*axes, Shard(0)], src_data_rank=None)
        return DTensor.from_local(
            cut.to_local().clone(),
            mesh,
            cut.placements,
            run_check=False,
            shape=cut.shape,
            stride=cut.stride(),
        )


def _agreed(names: list[str], keys: list[str], optimizer: Mapping[str, Any]) -> dict[str, float]:
    """One value per key for all of a group."""
    agreed: dict[str, float] = {}
    for name in names:
        for key in keys:
            value = optimizer.get(f"{name}.{key}")
            if value is not None and agreed.setdefault(key, float(value)) != float(value):
                raise _differ(name, key)
    return agreed


def _differ(name: str, key: str) -> ConfigError:
    return ConfigError(
        [
            Problem(
                f"optimizer.{name}.{key}",
                "differs between parameters of one group, and ZeRO has one value for all of them",
                "resume with the strategy that was saved, or put these parameters in own groups",
                has_value=False,
            )
        ]
    )
