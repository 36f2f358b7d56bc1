"""Convert what ZeRO has sharded to tensors under the user's names, and back.

Parameters are gathered on all ranks one at a time, and each rank keeps its slice along dim 0. So
all ranks write a checkpoint together, in the same form as fsdp's, and any layout can load it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from drivetrain.core.errors import ConfigError, Problem
from drivetrain.core.requirements import require
from drivetrain.parallel.model import Wanted, every_one
from drivetrain.parallel.parts import whole
from drivetrain.parallel.world import World

# The flat tensors that ZeRO's optimizer steps on, and the user's optimizer's state of them.
#
# This is the only code that depends on DeepSpeed's internals: stages 1 and 2 have one flat tensor
# per parameter group, stage 3 one per sub-group, which may be on a disk while it is not used. It is
# read and written inside `at_hand`: from the disk once for all parameters, not once for each.


class FlatGroups:
    """The flat tensors of stages 1 and 2."""

    def __init__(self, zero: Any) -> None:
        self._zero = zero
        self._optimizer: torch.optim.Optimizer = zero.optimizer

    @staticmethod
    def of(zero: Any, stage: int) -> FlatGroups:
        """Return the class for this stage."""
        return SubGroups(zero) if stage == 3 else FlatGroups(zero)

    @property
    def pieces(self) -> list[torch.Tensor]:
        """This rank's shard of each group, flat, in fp32."""
        return list(self._zero.single_partition_of_fp32_groups)

    def group_of(self, parameter: nn.Parameter) -> int:
        """Return the index of the piece that contains a parameter."""
        return next(
            index
            for index, group in enumerate(self._zero.bit16_groups)
            if any(each is parameter for each in group)
        )

    def by_group(
        self, named: Iterable[tuple[str, nn.Parameter]]
    ) -> dict[int, list[tuple[str, nn.Parameter]]]:
        """Return parameters by the piece that contains them, in the same order on all ranks."""
        groups: dict[int, list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in named:
            groups.setdefault(self.group_of(parameter), []).append((name, parameter))
        return dict(sorted(groups.items()))

    @contextmanager
    def at_hand(self, group: int, *, will_change: bool = False) -> Iterator[None]:
        """Make a piece and its state readable and, with `will_change`, writable inside."""
        yield

    def refresh_weights(self) -> None:
        """Copy the model's weights to the pieces."""
        self._zero.refresh_fp32_params()

    def keys_per_element(self, group: int) -> list[str]:
        """Return the keys of state that has a value per element, such as Adam's moments."""
        piece = self.pieces[group]
        return [k for k, v in self._state(piece).items() if _is_per_element(v, piece)]

    def common(self, group: int) -> dict[str, Any]:
        """Return the state that exists once per piece, such as the number of steps."""
        piece = self.pieces[group]
        return {
            key: value
            for key, value in self._state(piece).items()
            if value is not None and not _is_per_element(value, piece)
        }

    def set_common(self, group: int, values: dict[str, float]) -> None:
        state = self._state(self.pieces[group])
        for key, value in values.items():
            now = state[key]
            if isinstance(now, torch.Tensor):
                now.fill_(value)
            else:
                state[key] = type(now)(value)

    def get(self, parameter: nn.Parameter, key: str) -> torch.Tensor:
        """Return a parameter's state gathered from all ranks. A collective call."""
        whole: torch.Tensor = _api().safe_get_full_optimizer_state(parameter, key)
        return whole

    def set(self, parameter: nn.Parameter, key: str, whole: torch.Tensor) -> None:
        """Write this rank's shard of a parameter's state."""
        _api().safe_set_full_optimizer_state(parameter, whole, key)

    def make_state(self) -> None:
        """Let the optimizer create its state, with a step that changes no weights; all zeros."""
        if any(self._state(piece) for piece in self.pieces):
            return
        rates = [group["lr"] for group in self._optimizer.param_groups]
        for group in self._optimizer.param_groups:
            group["lr"] = 0.0
        for index, piece in enumerate(self.pieces):
            with self.at_hand(index, will_change=True):
                before, piece.grad = piece.grad, torch.zeros_like(piece)
                self._step(index)
                piece.grad = before
                for value in self._state(piece).values():
                    if isinstance(value, torch.Tensor):
                        value.zero_()
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        self.link()

    def link(self) -> None:
        """Let DeepSpeed link each parameter to its part of the state.

        By itself, DeepSpeed links when the first group has stepped and the others have no state.
        """
        if any(self._state(piece) for piece in self.pieces):
            self._zero._hp_optimizer_states_linked = False  # noqa: SLF001
            self._zero._lazy_init_hp_params_optimizer_state()  # noqa: SLF001

    def _state(self, piece: torch.Tensor) -> dict[str, Any]:
        # not by indexing, which would create an empty entry
        state: dict[str, Any] = self._optimizer.state.get(piece, {})
        return state

    def _step(self, index: int) -> None:
        groups = self._optimizer.param_groups
        self._optimizer.param_groups = [groups[index]]
        self._optimizer.step()
        self._optimizer.param_groups = groups


class SubGroups(FlatGroups):
    """The flat tensors of stage 3."""

    @property
    def pieces(self) -> list[torch.Tensor]:
        """This rank's shard of each sub-group."""
        return list(self._zero.fp32_partitioned_groups_flat)

    def group_of(self, parameter: nn.Parameter) -> int:
        return int(self._zero.grad_position[self._zero.get_param_id(parameter)][0])

    @contextmanager
    def at_hand(self, group: int, *, will_change: bool = False) -> Iterator[None]:
        """As in the base class; a piece on a disk is in memory inside."""
        if not self._zero._swappable_optimizer_subgroup(group):  # noqa: SLF001
            yield
            return
        self._zero._optimizer_states_and_gradient_swap_in(group)  # noqa: SLF001
        yield
        if will_change:
            self._zero._optimizer_states_and_gradient_swap_out(group)  # noqa: SLF001
        else:
            self._zero._release_swap_buffers(group)  # noqa: SLF001

    def refresh_weights(self) -> None:
        """Copy the weights here: DeepSpeed's own method expects everything in memory."""
        for group, piece in enumerate(self.pieces):
            with torch.no_grad(), self.at_hand(group, will_change=True):
                weights = self._zero.fp16_partitioned_groups_flat[group]
                if weights is None:  # they are on a disk
                    self._zero._swap_in_sub_group_to_flat_buffer(piece, group)  # noqa: SLF001
                else:
                    piece.copy_(weights)

    def get(self, parameter: nn.Parameter, key: str) -> torch.Tensor:
        """Gather without DeepSpeed's own function, which would read the piece from disk again."""
        part = self._part(parameter, key)
        whole: torch.Tensor = self._zero._fp32_state_allgather(parameter, part)  # noqa: SLF001
        return whole

    def set(self, parameter: nn.Parameter, key: str, whole: torch.Tensor) -> None:
        """Write this rank's shard, padded like DeepSpeed's if it does not divide evenly."""
        part = self._part(parameter, key).zero_()
        start = len(part) * int(self._zero._get_param_partition_rank(parameter))  # noqa: SLF001
        mine = whole.flatten()[start : start + len(part)]
        part[: mine.numel()] = mine

    def _part(self, parameter: nn.Parameter, key: str) -> torch.Tensor:
        group, start, size = self._zero.grad_position[self._zero.get_param_id(parameter)]
        state: torch.Tensor = self._state(self.pieces[group])[key]
        return state.narrow(0, int(start), int(size))

    def _step(self, index: int) -> None:
        group = self._optimizer.param_groups[self._zero.sub_group_to_group_id[index]]
        group["params"] = [self.pieces[index]]
        self._optimizer.step()
        group["params"] = []

    def link(self) -> None:
        """Do nothing: DeepSpeed looks up the state each time."""


def _api() -> ModuleType:
    return require("deepspeed.utils", extra="deepspeed")


def _is_per_element(value: Any, piece: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == piece.shape and piece.ndim > 0


Tensors = dict[str, torch.Tensor]


class Shards:
    """A model whose weights or optimizer state DeepSpeed has sharded over the ranks."""

    engine: Any
    """DeepSpeed's engine."""
    zero: Any
    """DeepSpeed's optimizer, around the user's own."""

    def __init__(self, model: nn.Module, world: World, stage: int) -> None:
        self.inner = model
        self.world = world
        self.stage = stage

    def whole_tensors(self, wanted: Wanted = every_one) -> Iterator[tuple[str, Any]]:
        """Yield each tensor in full; it is gathered only until the next one."""
        for name, tensor in self._named_tensors():
            if wanted(name):
                with self._gathered([tensor]):
                    yield name, tensor.detach()

    def model_state(self) -> Tensors:
        """Return this rank's slice of each weight, and full buffers."""
        slices = {}
        for name, tensor in self._named_tensors():
            if isinstance(tensor, nn.Parameter):
                with self._gathered([tensor]):
                    slices[name] = self._slice(tensor.detach())
            else:
                slices[name] = tensor.detach()
        return slices

    def optimizer_state(self, *, make: bool = False) -> dict[str, Any]:
        """Return this rank's slices of per-element state, and the state common to a group."""
        flat = FlatGroups.of(self.zero, self.stage)
        if make:
            flat.make_state()
        flat.link()
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
        """Load weights, then optimizer state: DeepSpeed copies the weights from the model."""
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
        """Make tensors available in full inside; stage 3 keeps weights in shards."""
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
        # src_data_rank=None: every rank has the full tensor, so nothing is sent. The local shard is
        # cloned below because a view would keep the full tensor alive.
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
    """Return one value per key for all parameters of a group; ConfigError if they differ."""
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
                "resume with the strategy that saved it, or give these parameters separate groups",
                has_value=False,
            )
        ]
    )
