"""Frozen weights, which need not be saved because the script creates them at every start.

A checkpoint without them stores a fingerprint of each, and is only loaded if they are the same.
A fingerprint is a sum over elements, so each rank adds up its own part and every layout gets the
same result.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from drivetrain.checkpoint.staging import version_of
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.parallel.parts import own_part

SumFloats = Callable[[list[float]], list[float]]
"""Sums over all ranks."""

_AT_ONCE = 1 << 22
_SAMPLED = 64
_HALF = 1 << 32
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class FrozenBase:
    """A model's frozen weights, as they were when the run started."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], sum_floats: SumFloats) -> None:
        self._tensors = dict(tensors)
        self._sum_floats = sum_floats
        self._began = {name: _mark(tensor) for name, tensor in tensors.items()}
        self._known: dict[str, str] = {}

    def unchanged(self) -> set[str]:
        """Return the weights not written to since; a teacher's may change. A collective call."""
        moved = [float(_mark(tensor) != self._began[n]) for n, tensor in self._tensors.items()]
        anywhere = self._sum_floats(moved) if moved else []
        return {name for name, count in zip(self._tensors, anywhere, strict=True) if not count}

    def fingerprints(self, names: Collection[str]) -> dict[str, str]:
        """Return fingerprints of unchanged tensors; each is read once. A collective call."""
        new = [name for name in self._tensors if name in names and name not in self._known]
        self._known |= fingerprints({name: self._tensors[name] for name in new}, self._sum_floats)
        return {name: self._known[name] for name in self._tensors if name in names}


def fingerprints(tensors: Mapping[str, torch.Tensor], sum_floats: SumFloats) -> dict[str, str]:
    """Hash every bit and its position, in any layout. Collective, with the same names on all."""
    parts: list[float] = []
    for tensor in tensors.values():
        own = _own_sum(tensor)
        parts += [own % _HALF, own // _HALF, own_part(tensor).numel()]
    sums = iter(map(int, sum_floats(parts) if parts else []))
    found = {}
    for (name, tensor), low, high, count in zip(tensors.items(), sums, sums, sums, strict=True):
        # the sums contain each part once per copy
        copies = max(1, count // max(1, tensor.numel()))
        total = (low + high * _HALF) // copies
        found[name] = f"{total % _HALF**2:016x}"
    return found


def check_base(
    folder: str, saved: Any, own: Mapping[str, torch.Tensor], sum_floats: SumFloats
) -> None:
    """Raise ConfigError if a frozen weight differs from the checkpoint's. A collective call."""
    found = fingerprints({name: own[name] for name in saved if name in own}, sum_floats)
    different = [name for name, value in found.items() if value != saved[name]]
    if different:
        more = f" (so do {len(different) - 1} more)" if len(different) > 1 else ""
        rule = (
            f"is frozen and differs from the base weights of {folder}{more}, which holds trained "
            "weights only (checkpoint.contents)"
        )
        remedy = "build the model from the same base weights, or start a new run"
        name = different[0].removeprefix("model.")
        raise ConfigError([Problem(name, rule, remedy, has_value=False)])


def _mark(tensor: torch.Tensor) -> tuple[int, bytes]:
    """Return a mark that changes with the tensor: torch's version counter and sampled values."""
    own = own_part(tensor).detach()
    some = own.reshape(-1)[:: max(1, own.numel() // _SAMPLED)]
    return version_of(tensor), some.cpu().contiguous().view(torch.uint8).numpy().tobytes()


def _own_sum(tensor: torch.Tensor) -> int:
    """Sum this rank's part: each element's bits times a weight for its position, modulo 2⁶⁴."""
    local, offsets = own_part(tensor).detach(), [0] * tensor.dim()
    if isinstance(tensor, DTensor):
        _, where = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
        offsets = list(where)
    if local.is_complex():
        local, offsets = torch.view_as_real(local.resolve_conj()), [*offsets, 0]
    if not local.dim():
        local, offsets = local.reshape(1), [0]
    return _weighted_sum(local, offsets) if local.numel() else 0


def _weighted_sum(local: torch.Tensor, offsets: Sequence[int]) -> int:
    weights = [
        _weights(dim, start, size, local.device)
        for dim, (start, size) in enumerate(zip(offsets, local.shape, strict=True))
    ]
    rows = max(1, _AT_ONCE * len(local) // local.numel())
    total = torch.zeros((), dtype=torch.int64, device=local.device)
    for start in range(0, len(local), rows):
        some = local[start : start + rows].contiguous().view(_INTEGERS[local.element_size()])
        added = some.to(torch.int64)
        for weight in reversed(weights[1:]):
            added = (added * weight).sum(-1)
        total += (added * weights[0][start : start + rows]).sum()
    return int(total) % _HALF**2


def _weights(dim: int, start: int, size: int, device: torch.device) -> torch.Tensor:
    """Return pseudo-random odd numbers for positions along a dimension."""
    places = torch.arange(start, start + size, dtype=torch.int64, device=device)
    mixed = (places + 1 + (dim << 48)) * 0x1E3779B97F4A7C15
    mixed = (mixed ^ (mixed >> 29)) * 0x3F58476D1CE4E5B9
    return (mixed ^ (mixed >> 32)) | 1
