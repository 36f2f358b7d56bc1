"""FSDP2 as one of thousands of ranks that are not there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class _Pieces:
    """What torch.chunk gives, filled up with empty ones; a piece is made when it is asked for."""

    def __init__(self, tensor: torch.Tensor, num_chunks: int, dim: int) -> None:
        self._tensor, self._dim = tensor, dim
        self._size = -(-tensor.shape[dim] // num_chunks)

    def __getitem__(self, index: int) -> torch.Tensor:
        length = self._tensor.shape[self._dim]
        start = min(index * self._size, length)
        return self._tensor.narrow(self._dim, start, min(self._size, length - start))


@contextmanager
def cutting_one_shard() -> Iterator[None]:
    """FSDP cuts every weight into all ranks' shards and keeps one: at thousands, that is slow."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    original = vars(_fsdp_param)["_chunk_with_empty"]
    vars(_fsdp_param)["_chunk_with_empty"] = _Pieces
    try:
        yield
    finally:
        vars(_fsdp_param)["_chunk_with_empty"] = original
