"""Whole tensors of a checkpoint, put together from their pieces, without a process group.

One at a time, when asked for: what is in memory is what the caller keeps.
"""

from __future__ import annotations

import math

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from drivetrain.checkpoint import tensor_index
from drivetrain.checkpoint.manifest import Manifest
from drivetrain.checkpoint.shards import ShardReader
from drivetrain.checkpoint.storage import Storage


class WholeTensors:
    """A checkpoint's tensors by name; each piece is held to its checksum as it is read."""

    def __init__(self, place: Storage, manifest: Manifest) -> None:
        self._reader = ShardReader(place, manifest)
        self._metadata = self._reader.read_metadata()

    def names(self) -> list[str]:
        """In the order they were written down."""
        return list(self._metadata.state_dict_metadata)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the whole tensor."""
        return tuple(self._entry(name).size)

    def dtype(self, name: str) -> torch.dtype:
        """As it was trained with."""
        return self._entry(name).properties.dtype

    def num_bytes(self, name: str) -> int:
        """Of the whole tensor, in memory as on disk."""
        return math.prod(self.shape(name)) * self.dtype(name).itemsize

    def read(self, name: str) -> torch.Tensor:
        """The whole tensor; DamagedCheckpoint when a piece is wrong."""
        entry = self._entry(name)
        whole = torch.empty(entry.size, dtype=entry.properties.dtype)
        for chunk in entry.chunks:
            part = whole
            for dim, (start, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
                part = part.narrow(dim, start, size)
            part.copy_(self._reader.tensor(MetadataIndex(name, chunk.offsets)))
        return whole

    def _entry(self, name: str) -> TensorStorageMetadata:
        return tensor_index.described(self._metadata, name)
