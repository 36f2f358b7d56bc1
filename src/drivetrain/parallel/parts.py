"""Tensors that ranks hold parts of (DTensors): whole, in parts, and their norm."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

# It advises, of every tensor that two axes cut, to put it together in one collective, which it then
# says cannot be done.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)

# Tensors that ranks hold parts of (DTensors), whole and in parts.


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole as a plain tensor: gathered where ranks hold parts, which is a collective call."""
    if not isinstance(tensor, DTensor):
        return tensor
    device = tensor.device_mesh.device_type
    # shards that wait on the host travel over their ranks' devices
    moved: DTensor = tensor if tensor.device.type == device else tensor.to(device)  # type: ignore[assignment]
    return moved.full_tensor()


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of it, as a plain tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def on_host(value: Any) -> Any:
    """A tensor on the CPU, so that any machine can read it; what is no tensor stays as it is."""
    return value.cpu() if isinstance(value, torch.Tensor) else value


def local_parts(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The plain tensors this rank holds."""
    return [t.to_local() if isinstance(t, DTensor) else t for t in tensors]


# The norm of gradients that lie on different meshes, or whole.


def total_norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    """The 2-norm over all shards of all gradients, as a plain tensor. A collective call."""
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
    """As torch's get_total_norm, without sorting by device and dtype where there is one of each.

    The operations and their order are the same, so the bits are; sorting costs as much as they do.
    """
    if len({(gradient.device, gradient.dtype) for gradient in gradients}) != 1:
        return torch.nn.utils.get_total_norm(gradients)
    norms = torch._foreach_norm(gradients)  # noqa: SLF001 - it has no other name
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


def _num_cuts(tensor: DTensor) -> int:
    return sum(not isinstance(placement, Replicate) for placement in tensor.placements)


def _over_axes(gradients: list[DTensor], mesh: DeviceMesh) -> torch.Tensor:
    """Of gradients that are cut along several axes: one small sum along each.

    torch's own way goes over the axes twice for each gradient, and says so in a warning.
    """
    squares = torch.nn.utils.get_total_norm(local_parts([*gradients])) ** 2
    for axis in range(mesh.ndim):
        if not isinstance(gradients[0].placements[axis], Replicate):
            dist.all_reduce(squares, group=mesh.get_group(axis))
    return squares.sqrt()
