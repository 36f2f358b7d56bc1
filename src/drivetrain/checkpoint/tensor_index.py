"""The index of a checkpoint in JSON: where in which file each piece of a tensor is.

torch stores this in a pickle, and loading a pickle can run code. This is the same information as
plain text: reading a checkpoint never runs code from it.

For thousands of ranks it has one line per rank, in the order received, and is never in memory as a
whole while it is written; for fewer ranks it is one merged line.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import BinaryIO

import torch
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from drivetrain.checkpoint.index_check import NAME, merged, read_index
from drivetrain.checkpoint.manifest import DamagedCheckpoint

__all__ = ["NAME", "Piece", "described", "dtype_name", "from_json", "to_json", "write_lines"]


@dataclass(frozen=True)
class Piece:
    """Where the bytes of one piece of a tensor are stored."""

    file: str
    start: int
    length: int
    crc32: str
    digest: str = ""
    """Set if saves are incremental; see unchanged.py."""


MOST_MERGED = 32 << 20
"""Lines are merged into one up to this total size in bytes."""


def write_lines(lines: Iterable[bytes], file: BinaryIO) -> tuple[int, str]:
    """Write the index from the ranks' lines; return its size and checksum."""
    held: list[bytes] = []
    total = 0
    source = iter(lines)
    for line in source:
        held.append(line)
        total += len(line)
        if total > MOST_MERGED:
            break
    else:
        held = [json.dumps(merged(map(json.loads, held))).encode()]
    size, crc32 = 0, 0
    for number, line in enumerate(chain(held, source)):
        data = b"\n" + line if number else line
        file.write(data)
        size, crc32 = size + len(data), zlib.crc32(data, crc32)
    return size, f"{crc32:08x}"


def to_json(metadata: Metadata, pieces: Mapping[MetadataIndex, Piece]) -> bytes:
    """Return a rank's line of the index."""
    tensors = {}
    for name, tensor in metadata.state_dict_metadata.items():
        if not isinstance(tensor, TensorStorageMetadata):
            raise TypeError(f"{name}: only tensors are stored as pieces")
        chunks = []
        for chunk in tensor.chunks:
            piece = pieces[MetadataIndex(name, chunk.offsets)]
            where = [piece.file, piece.start, piece.length, piece.crc32]
            where += [piece.digest] if piece.digest else []
            chunks.append([list(chunk.offsets), list(chunk.sizes), *where])
        dtype = dtype_name(tensor.properties.dtype)
        tensors[name] = {"dtype": dtype, "size": list(tensor.size), "chunks": chunks}
    return json.dumps(tensors).encode()


def from_json(data: bytes, sizes: Mapping[str, int]) -> Metadata:
    """Parse an index into torch's Metadata, with pieces as storage data; `sizes`: bytes by file."""
    entries: dict[str, STORAGE_TYPES] = {}
    pieces: dict[MetadataIndex, Piece] = {}
    for name, entry in read_index(data, sizes).items():
        chunks = []
        for offsets, lengths, *where in entry["chunks"]:
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(lengths)))
            pieces[MetadataIndex(name, offsets)] = Piece(*where)
        properties = TensorProperties(dtype=_dtype(entry["dtype"]))
        entries[name] = TensorStorageMetadata(properties, torch.Size(entry["size"]), chunks)
    return Metadata(state_dict_metadata=entries, storage_data=pieces)


def described(metadata: Metadata, name: str) -> TensorStorageMetadata:
    """Return a tensor's entry; DamagedCheckpoint if it is not a tensor."""
    entry = metadata.state_dict_metadata[name]
    if not isinstance(entry, TensorStorageMetadata):
        raise DamagedCheckpoint(f"{name} is not stored as a tensor")
    return entry


def dtype_name(dtype: torch.dtype) -> str:
    """Return the dtype's name in an index."""
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise DamagedCheckpoint(f"{NAME} cannot be read ({name} is not a dtype)")
    return dtype
