"""Messages between workers and servers: tensors of a shard, each in full, by rows, or omitted.

A payload is one tensor of bytes: a number per tensor (how many rows follow, or that all or none
do), then row indices and values. Every piece is padded to a multiple of 8 bytes, so that it can be
viewed in place. Values keep their exact bits in every number format.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

_NONE, _WHOLE = -1, -2
_ALIGNED = 8


@dataclass(frozen=True)
class Push:
    """A worker's gradients for one server."""

    worker: int
    clock: int
    """Steps that this worker has taken since the servers opened, including this one."""
    pulled: int
    """The version of the weights that the gradients were computed with."""
    wants_weights: bool
    rates: tuple[float, ...]
    """Learning rate of each parameter group, for pushes that are applied as updates: the server's
    rank may be at a different step."""
    gradients: torch.Tensor | None
    """A payload; None if the worker had no samples."""


@dataclass(frozen=True)
class Reply:
    """A server's reply to a push."""

    version: int
    """Number of updates that the shard has had."""
    staleness: int
    """Updates of the shard between the worker's last pull and its push."""
    weights: torch.Tensor | None
    """A payload; None if the worker requested no weights."""


@dataclass(frozen=True)
class Piece:
    """One tensor of a payload, or some of its rows."""

    values: torch.Tensor
    rows: torch.Tensor | None

    def into(self, target: torch.Tensor) -> None:
        """Overwrite the target, or only these rows of it."""
        with torch.no_grad():
            if self.rows is None:
                target.copy_(self.values)
            else:
                rows = self.rows.to(target.device)
                target.index_copy_(0, rows, self.values.to(target.device))


def pack(
    tensors: Sequence[torch.Tensor | None], rows: Sequence[torch.Tensor | None]
) -> torch.Tensor | None:
    """Return a payload with the given `rows` of each tensor (None: all); None if it is empty."""
    if all(tensor is None for tensor in tensors):
        return None
    kinds, pieces = [], []
    for tensor, chosen in zip(tensors, rows, strict=True):
        if tensor is None:
            kinds.append(_NONE)
        elif chosen is None:
            kinds.append(_WHOLE)
            pieces.append(_bytes(tensor))
        else:
            kinds.append(len(chosen))
            pieces += [_bytes(chosen), _bytes(tensor[chosen])]
    return torch.cat([_bytes(torch.tensor(kinds, dtype=torch.int64)), *pieces])


def unpack(payload: torch.Tensor, like: Sequence[torch.Tensor]) -> list[Piece | None]:
    """Return what `pack` was given, for tensors of these shapes and dtypes."""
    at = _ALIGNED * len(like)
    found: list[Piece | None] = []

    def take(num: int, dtype: torch.dtype) -> torch.Tensor:
        nonlocal at
        end = at + num * dtype.itemsize
        piece = payload[at:end].view(dtype)
        at = -(-end // _ALIGNED) * _ALIGNED
        return piece

    for kind, tensor in zip(payload[:at].view(torch.int64).tolist(), like, strict=True):
        if kind == _NONE:
            found.append(None)
        elif kind == _WHOLE:
            found.append(Piece(take(tensor.numel(), tensor.dtype).view(tensor.shape), None))
        else:
            rows = take(kind, torch.int64)
            width = tensor.shape[1]
            found.append(Piece(take(kind * width, tensor.dtype).view(kind, width), rows))
    if at != len(payload):
        raise RuntimeError(f"a message of {len(payload)} bytes, of which {at} were decoded")
    return found


def rows_to_send(tensor: torch.Tensor, is_meant: torch.Tensor) -> torch.Tensor | None:
    """Return the indices of the marked rows; None if the full matrix is not larger."""
    rows = is_meant.nonzero().flatten()
    row_bytes = tensor.shape[1] * tensor.element_size()
    return rows if len(rows) * (row_bytes + _ALIGNED) < tensor.nbytes else None


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
    missing = -len(flat) % _ALIGNED
    return torch.nn.functional.pad(flat, (0, missing)) if missing else flat
