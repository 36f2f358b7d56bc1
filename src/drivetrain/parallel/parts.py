"""Helpers for DTensors: whole tensors, local parts, and the norm of gradients."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

# For every tensor sharded along two axes it advises to gather it in one collective, and then
# reports that this is not possible.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole plain tensor. For a DTensor this gathers, which is a collective call."""
    if not isinstance(tensor, DTensor):
        return tensor
    device = tensor.device_mesh.device_type
    # shards on the host are gathered through their ranks' devices
    moved: DTensor = tensor if tensor.device.type == device else tensor.to(device)  # type: ignore[assignment]
    return moved.full_tensor()


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part as a plain tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def on_host(value: Any) -> Any:
    """Move a tensor to the CPU, so any machine can read it; return other values unchanged."""
    return value.cpu() if isinstance(value, torch.Tensor) else value


def local_parts(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return this rank's parts as plain tensors."""
    return [t.to_local() if isinstance(t, DTensor) else t for t in tensors]


# The norm of gradients that are on different meshes, or plain tensors.


def total_norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    """Return the 2-norm over all shards of all gradients. A collective call."""
    if not any(isinstance(gradient, DTensor) for gradient in gradients):
        return _plain_norm(gradients)
    by_mesh: dict[DeviceMesh | None, list[torch.Tensor]] = {}
    cut_twice: dict[DeviceMesh, list[DTensor]] = {}
    for gradient in gradients:
        if isinstance(gradient, DTensor) and _num_cuts(gradient) > 1:
            cut_twice.setdefault(gradient.device_mesh, []).append(gradient)
        else:
            mesh = gradient.device_mesh if isinstance(gradient, DTensor) else None
            by_mesh.setdefault(mesh, []).append(gradient)
    norms = [whole(torch.nn.utils.get_total_norm(group)) for group in by_mesh.values()]
    norms += [_over_axes(group, mesh) for mesh, group in cut_twice.items()]
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


def _plain_norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    """Return torch's get_total_norm, without grouping if there is one device and one dtype.

    The same operations in the same order give the same bits; grouping costs as much as they do.
    """
    if len({(gradient.device, gradient.dtype) for gradient in gradients}) != 1:
        return torch.nn.utils.get_total_norm(gradients)
    norms = torch._foreach_norm(gradients)  # noqa: SLF001 - it has no other name
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


def _num_cuts(tensor: DTensor) -> int:
    return sum(not isinstance(placement, Replicate) for placement in tensor.placements)


def _over_axes(gradients: list[DTensor], mesh: DeviceMesh) -> torch.Tensor:
    """Return the norm of gradients sharded along several axes, with one small sum per axis.

    torch's own way communicates over the axes twice for each gradient, and warns about it.
    """
    squares = torch.nn.utils.get_total_norm(local_parts([*gradients])) ** 2
    for axis in range(mesh.ndim):
        if not isinstance(gradients[0].placements[axis], Replicate):
            dist.all_reduce(squares, group=mesh.get_group(axis))
    return squares.sqrt()
