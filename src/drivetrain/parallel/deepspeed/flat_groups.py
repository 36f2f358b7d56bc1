"""The flat pieces that ZeRO's optimizer steps on, and what the user's optimizer keeps about them.

All that is known here of DeepSpeed's inside: stages 1 and 2 have one flat piece per parameter
group, stage 3 one per sub-group, which may lie on a disk while it is not used.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import nn

from drivetrain.core.extras import require


class FlatGroups:
    """Stages 1 and 2."""

    def __init__(self, zero: Any) -> None:
        self._zero = zero
        self._optimizer: torch.optim.Optimizer = zero.optimizer

    @staticmethod
    def of(zero: Any, stage: int) -> FlatGroups:
        """The kind that fits the stage."""
        return SubGroups(zero) if stage == 3 else FlatGroups(zero)

    @property
    def pieces(self) -> list[torch.Tensor]:
        """This rank's part of each group, flat, in fp32."""
        return list(self._zero.single_partition_of_fp32_groups)

    def group_of(self, parameter: nn.Parameter) -> int:
        """The piece a parameter lies in."""
        return next(
            index
            for index, group in enumerate(self._zero.bit16_groups)
            if any(each is parameter for each in group)
        )

    def keys_per_element(self) -> list[str]:
        """What the optimizer keeps for each element, such as Adam's moments."""
        piece = self.pieces[0]
        return [k for k, v in self._state(piece).items() if _is_per_element(v, piece)]

    def common(self, parameter: nn.Parameter) -> dict[str, Any]:
        """What it keeps once, such as the number of steps."""
        piece = self.pieces[self.group_of(parameter)]
        return {
            key: value
            for key, value in self._state(piece).items()
            if value is not None and not _is_per_element(value, piece)
        }

    def set_common(self, group: int, values: dict[str, float]) -> None:
        """The same back."""
        state = self._state(self.pieces[group])
        for key, value in values.items():
            now = state[key]
            if isinstance(now, torch.Tensor):
                now.fill_(value)
            else:
                state[key] = type(now)(value)

    def get(self, parameter: nn.Parameter, key: str) -> torch.Tensor:
        """A parameter's numbers, put together from all ranks. A collective call."""
        whole: torch.Tensor = _api().safe_get_full_optimizer_state(parameter, key)
        return whole

    def set(self, parameter: nn.Parameter, key: str, whole: torch.Tensor) -> None:
        """This rank's part of them."""
        _api().safe_set_full_optimizer_state(parameter, whole, key)

    def make_state(self) -> None:
        """Let the optimizer make what it keeps, as in a step that moves nothing; all zeros."""
        if any(self._state(piece) for piece in self.pieces):
            return
        rates = [group["lr"] for group in self._optimizer.param_groups]
        for group in self._optimizer.param_groups:
            group["lr"] = 0.0
        for index, piece in enumerate(self.pieces):
            with self._at_hand(index):
                before, piece.grad = piece.grad, torch.zeros_like(piece)
                self._step(index)
                piece.grad = before
                for value in self._state(piece).values():
                    if isinstance(value, torch.Tensor):
                        value.zero_()
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        self._link()

    def _state(self, piece: torch.Tensor) -> dict[str, Any]:
        # not by indexing, which would make an empty entry
        state: dict[str, Any] = self._optimizer.state.get(piece, {})
        return state

    @contextmanager
    def _at_hand(self, index: int) -> Iterator[None]:  # noqa: ARG002
        yield

    def _step(self, index: int) -> None:
        groups = self._optimizer.param_groups
        self._optimizer.param_groups = [groups[index]]
        self._optimizer.step()
        self._optimizer.param_groups = groups

    def _link(self) -> None:
        """DeepSpeed finds a parameter's part of the new state."""
        self._zero._lazy_init_hp_params_optimizer_state()  # noqa: SLF001


class SubGroups(FlatGroups):
    """Stage 3."""

    @property
    def pieces(self) -> list[torch.Tensor]:
        """This rank's part of each sub-group."""
        return list(self._zero.fp32_partitioned_groups_flat)

    def group_of(self, parameter: nn.Parameter) -> int:
        """DeepSpeed has noted it."""
        return int(self._zero.grad_position[self._zero.get_param_id(parameter)][0])

    def set(self, parameter: nn.Parameter, key: str, whole: torch.Tensor) -> None:
        """DeepSpeed pads what the ranks do not divide evenly, and so does this."""
        cut: Any = parameter  # DeepSpeed's addition to it is not torch's
        size = int(cut.partition_numel())
        start = size * int(self._zero._get_param_partition_rank(parameter))  # noqa: SLF001
        part = torch.zeros(size, dtype=whole.dtype, device=whole.device)
        mine = whole.flatten()[start : start + size]
        part[: mine.numel()] = mine
        _api().safe_set_local_optimizer_state(parameter, part, key)

    @contextmanager
    def _at_hand(self, index: int) -> Iterator[None]:
        """A piece that lies on a disk is brought in for the time."""
        is_away = self._zero._swappable_optimizer_subgroup(index)  # noqa: SLF001
        if is_away:
            self._zero._optimizer_states_and_gradient_swap_in(index)  # noqa: SLF001
        yield
        if is_away:
            self._zero._optimizer_states_and_gradient_swap_out(index)  # noqa: SLF001

    def _step(self, index: int) -> None:
        group = self._optimizer.param_groups[self._zero.sub_group_to_group_id[index]]
        group["params"] = [self.pieces[index]]
        self._optimizer.step()
        group["params"] = []

    def _link(self) -> None:
        """Nothing to link: DeepSpeed looks it up each time."""


def _api() -> ModuleType:
    return require("deepspeed.utils", extra="deepspeed")


def _is_per_element(value: Any, piece: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == piece.shape and piece.ndim > 0
