"""Staging: a copy of this rank's tensors in memory, which is all that a step waits for.

The copy's memory is kept from save to save. Tensors of all kinds are copied in one call; on a GPU
into page-locked memory, so that the copies run side by side.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.tensor import DTensor

from drivetrain.parallel.parts import own_part


class CopyInMemory(AsyncStager):
    """Torch's interface to it; one save at a time."""

    _synchronize_after_execute = False

    def __init__(self, device: torch.device) -> None:
        self._has_cuda = device.type == "cuda"
        self._kept: dict[str, torch.Tensor] = {}

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The copies, by the same names."""
        for name, tensor in state_dict.items():
            kept = self._kept.get(name)
            if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
                self._kept[name] = self._room_for(tensor)
        staged = {name: self._kept[name] for name in state_dict}
        with torch.no_grad():
            torch._foreach_copy_(
                [_local(tensor) for tensor in staged.values()],
                [_local(tensor) for tensor in state_dict.values()],
                non_blocking=self._has_cuda,
            )
        if self._has_cuda:
            torch.cuda.synchronize()
        return staged

    def synchronize_staging(self) -> None:
        """Nothing is left to wait for."""
        return

    def close(self) -> None:
        """Give the memory back."""
        self._kept = {}

    def _room_for(self, tensor: torch.Tensor) -> torch.Tensor:
        local = _local(tensor)
        room = torch.empty(local.shape, dtype=local.dtype, device="cpu", pin_memory=self._has_cuda)
        if not isinstance(tensor, DTensor):
            return room
        return DTensor.from_local(
            room,
            tensor.device_mesh,
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """The memory this rank holds of it."""
    return own_part(tensor).detach()
