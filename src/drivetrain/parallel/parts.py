"""Tensors that ranks hold parts of (DTensors), whole and in parts."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole as a plain tensor: gathered where ranks hold parts, which is a collective call."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of it, as a plain tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_parts(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The plain tensors this rank holds."""
    return [own_part(tensor) for tensor in tensors]
