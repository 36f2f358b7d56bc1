"""Set the weights of a model on the meta device: this rank's parts, one tensor at a time."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from drivetrain.parallel.parts import own_part
from drivetrain.train.weights.recording import Box, Part


class Weights(Protocol):
    """A source of a model's weights."""

    def opened(self) -> AbstractContextManager[Part]:
        """Context with a function that returns a part of a tensor by name. Opened on all ranks."""
        ...


def place(
    model: nn.Module, weights: Weights, shards_on: torch.device, device: torch.device
) -> None:
    """Set the weights of a model that may be divided or sharded.

    `shards_on` is the device of its parameters.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        # tensors that a module moves itself and that are not weights (torchmetrics) have values
        is_empty = tensor.device.type == "meta"
        return torch.empty_like(tensor, device=shards_on) if is_empty else tensor.to(device)

    model._apply(moved)  # noqa: SLF001 - to_empty() calls it, but would empty everything
    _tie(model, parameters)
    with torch.no_grad(), weights.opened() as part:
        for name, parameter in model.named_parameters():
            own = own_part(parameter)
            if own.numel():
                own.copy_(part(name, box_of(parameter)))
        filled: dict[int, torch.Tensor] = {}
        for name, buffer in buffers.items():
            if id(buffer) not in filled:
                filled[id(buffer)] = part(name, ()).to(device, copy=True)
            holder, _, key = name.rpartition(".")
            model.get_submodule(holder)._buffers[key] = filled[id(buffer)]  # noqa: SLF001


def _tie(model: nn.Module, before: dict[str, nn.Parameter]) -> None:
    """Tie parameters again that were tied before."""
    made: dict[int, nn.Parameter] = {}
    for name, parameter in before.items():
        holder, _, key = name.rpartition(".")
        held = model.get_submodule(holder)._parameters  # noqa: SLF001 - without setattr's hooks
        own = held[key]
        if own is not None:
            held[key] = made.setdefault(id(parameter), own)


def box_of(tensor: torch.Tensor) -> Box:
    """Return the part of the whole tensor that this rank holds."""
    if not isinstance(tensor, DTensor):
        return ()
    where = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tuple(slice(start, start + size) for size, start in zip(*where, strict=True))
