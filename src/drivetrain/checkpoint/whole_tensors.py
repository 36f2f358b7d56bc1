"""Reassemble whole tensors of a checkpoint from their pieces, without a process group.

Tensors are read one at a time, so only those the caller keeps are in memory. A streamed tensor is
not in memory as a whole either, only rows that are sharded along another dimension as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from drivetrain.checkpoint import tensor_index
from drivetrain.checkpoint.manifest import Manifest
from drivetrain.checkpoint.shards import ShardReader
from drivetrain.checkpoint.storage import Storage
from drivetrain.checkpoint.weight_files import Data, raw_bytes


class WholeTensors:
    """A checkpoint's tensors by name; checksums are verified while reading."""

    def __init__(self, storage: Storage, manifest: Manifest) -> None:
        self._reader = ShardReader(storage, manifest)
        self._metadata = self._reader.read_metadata()

    def names(self) -> list[str]:
        """Return the names in the order of the index."""
        return list(self._metadata.state_dict_metadata)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._entry(name).size)

    def dtype(self, name: str) -> torch.dtype:
        return self._entry(name).properties.dtype

    def num_bytes(self, name: str) -> int:
        """Return the size of the whole tensor, which is the same in memory and on disk."""
        return math.prod(self.shape(name)) * self.dtype(name).itemsize

    def read(self, name: str) -> torch.Tensor:
        """Return the whole tensor; raise DamagedCheckpoint if a piece is damaged."""
        entry = self._entry(name)
        whole = torch.empty(entry.size, dtype=entry.properties.dtype)
        for chunk in entry.chunks:
            part = whole
            for dim, (start, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
                part = part.narrow(dim, start, size)
            part.copy_(self._reader.tensor(MetadataIndex(name, chunk.offsets)))
        return whole

    def stream(self, name: str) -> Iterator[Data]:
        """Yield the whole tensor's bytes in order; DamagedCheckpoint if a piece is damaged."""
        entry = self._entry(name)
        chunks = [chunk for chunk in entry.chunks if math.prod(chunk.sizes)]
        if any(chunk.sizes[1:] != entry.size[1:] for chunk in chunks):
            yield from self._bands(name, entry, chunks)
            return
        for chunk in sorted(chunks, key=lambda each: each.offsets[:1]):
            yield from self._reader.stream(MetadataIndex(name, chunk.offsets))

    def _bands(
        self, name: str, entry: TensorStorageMetadata, chunks: list[ChunkStorageMetadata]
    ) -> Iterator[Data]:
        """Yield rows between piece boundaries; a piece is kept while later bands need it."""
        cuts = sorted({c.offsets[0] for c in chunks} | {c.offsets[0] + c.sizes[0] for c in chunks})
        kept: dict[torch.Size, torch.Tensor] = {}
        for start, end in pairwise(cuts):
            band = torch.empty((end - start, *entry.size[1:]), dtype=entry.properties.dtype)
            for chunk in chunks:
                last = chunk.offsets[0] + chunk.sizes[0]
                if chunk.offsets[0] >= end or last <= start:
                    continue
                piece = kept.pop(chunk.offsets, None)
                if piece is None:
                    piece = self._reader.tensor(MetadataIndex(name, chunk.offsets))
                if last > end:
                    kept[chunk.offsets] = piece
                part = band
                places = zip(chunk.offsets[1:], chunk.sizes[1:], strict=True)
                for dim, (at, size) in enumerate(places, 1):
                    part = part.narrow(dim, at, size)
                part.copy_(piece.narrow(0, start - chunk.offsets[0], end - start))
            yield raw_bytes(band)

    def _entry(self, name: str) -> TensorStorageMetadata:
        return tensor_index.described(self._metadata, name)
