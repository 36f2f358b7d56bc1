"""Tensors that ranks hold parts of (DTensors), whole and in parts."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole as a plain tensor: gathered where ranks hold parts, which is a collective call."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of it, as a plain tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def on_host(value: Any) -> Any:
    """A tensor on the CPU, so that any machine can read it; what is no tensor stays as it is."""
    return value.cpu() if isinstance(value, torch.Tensor) else value


def local_parts(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The plain tensors this rank holds."""
    return [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
