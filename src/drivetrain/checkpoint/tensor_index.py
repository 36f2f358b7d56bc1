"""Which bytes of which file are which piece of which tensor, as JSON.

torch keeps this in a pickle, and loading a pickle runs whatever is in it. This is the same
information as plain text: reading a checkpoint never runs code from it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from drivetrain.checkpoint.manifest import DamagedCheckpoint

NAME = "index.json"


@dataclass(frozen=True)
class Piece:
    """Where the bytes of one piece of a tensor lie."""

    file: str
    start: int
    length: int
    crc32: str


def to_json(metadata: Metadata, pieces: Mapping[MetadataIndex, Piece]) -> bytes:
    """The index of a checkpoint as it was planned and written."""
    tensors = {}
    for name, tensor in metadata.state_dict_metadata.items():
        if not isinstance(tensor, TensorStorageMetadata):
            raise TypeError(f"{name}: only tensors are stored as pieces")
        chunks = []
        for chunk in tensor.chunks:
            piece = pieces[MetadataIndex(name, chunk.offsets)]
            where = [piece.file, piece.start, piece.length, piece.crc32]
            chunks.append([list(chunk.offsets), list(chunk.sizes), *where])
        dtype = str(tensor.properties.dtype).removeprefix("torch.")
        tensors[name] = {"dtype": dtype, "size": list(tensor.size), "chunks": chunks}
    return json.dumps(tensors).encode()


def from_json(data: bytes) -> Metadata:
    """Torch's own metadata, with our pieces as its storage data."""
    try:
        tensors = json.loads(data)
        entries: dict[str, STORAGE_TYPES] = {}
        pieces: dict[MetadataIndex, Piece] = {}
        for name, entry in tensors.items():
            chunks = []
            for offsets, sizes, *where in entry["chunks"]:
                chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
                pieces[MetadataIndex(name, offsets)] = Piece(*where)
            _check_covered(name, entry["size"], chunks)
            properties = TensorProperties(dtype=_dtype(entry["dtype"]))
            entries[name] = TensorStorageMetadata(properties, torch.Size(entry["size"]), chunks)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpoint(f"{NAME} cannot be read ({error})") from error
    return Metadata(state_dict_metadata=entries, storage_data=pieces)


def described(metadata: Metadata, name: str) -> TensorStorageMetadata:
    """A tensor's entry."""
    entry = metadata.state_dict_metadata[name]
    if not isinstance(entry, TensorStorageMetadata):
        raise DamagedCheckpoint(f"{name} is not stored as a tensor")
    return entry


def _check_covered(name: str, size: list[int], chunks: list[ChunkStorageMetadata]) -> None:
    """What no piece covers would be left as it was, and nobody would notice."""
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(size):
        raise DamagedCheckpoint(f"{NAME} lists pieces of {name} that do not make up the whole")


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name} is no number format")
    return dtype
