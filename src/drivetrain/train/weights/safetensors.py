"""Locate the tensors in a folder of safetensors, and read a part of one.

A file consists of eight bytes with the length of its header, the header (JSON: name, dtype, shape
and offsets of each tensor) and the tensors' bytes in row-major order. The contents are untrusted:
sizes are bounded, offsets must be within the file and match the shape, and nothing is executed.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch

from drivetrain.checkpoint.storage import LocalStorage, Storage, storage_at
from drivetrain.checkpoint.weight_files import DTYPES, INDEX
from drivetrain.core.bounded import SMALL_BYTES, parse_json
from drivetrain.core.text import readable_bytes
from drivetrain.train.weights.recording import Box

_ENDING = ".safetensors"
_MOST_HEADER = 100 << 20
"""Limit of the safetensors format."""
_MOST_INDEX = 16 * SMALL_BYTES
_MOST_FILES = 4096
_AT_ONCE = 64 << 20
_SHORT = 1 << 20
"""From an object store, runs shorter than this are read together with the bytes between them."""
_PROBED = 4096


class NotReadable(Exception):
    """A folder is damaged or has no safetensors; the message is one sentence."""


@dataclass(frozen=True)
class Stored:
    """Location of one tensor."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.torch_dtype.itemsize


@dataclass(frozen=True)
class Folder:
    """All tensors of a folder, by name."""

    address: str
    tensors: Mapping[str, Stored]
    fingerprint: str
    """Digest of the files' headers, their sizes and a few of their bytes."""

    def to_json(self) -> dict[str, Any]:
        """Return plain values to send to other ranks."""
        places = {n: [s.file, s.dtype, s.shape, s.start] for n, s in self.tensors.items()}
        return {"address": self.address, "tensors": places, "fingerprint": self.fingerprint}

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> Folder:
        """Rebuild a folder from the result of `to_json`."""
        tensors = {
            name: Stored(file, dtype, tuple(shape), start)
            for name, (file, dtype, shape, start) in said["tensors"].items()
        }
        return cls(said["address"], tensors, said["fingerprint"])


def open_folder(address: str) -> Folder:
    """Read the index and the headers; NotReadable if something is wrong with them."""
    files, storage = _files(address)
    digest = hashlib.blake2b(digest_size=8)
    tensors: dict[str, Stored] = {}
    for file in files:
        for name, stored in _header(storage, file, digest):
            if name in tensors:
                raise NotReadable(f"{name} is in both {tensors[name].file} and {file}")
            tensors[name] = stored
    return Folder(storage.address, tensors, digest.hexdigest())


def _files(address: str) -> tuple[list[str], Storage]:
    if address.endswith(_ENDING):
        folder, _, file = address.rpartition("/")
        return [file], storage_at(folder or ".")
    storage = storage_at(address)
    names = storage.names()
    found = [name for name in names if name.endswith(_ENDING)]
    if INDEX in names:
        return _indexed(storage), storage
    if len(found) == 1:
        return found, storage
    if found:
        raise NotReadable(f"{len(found)} safetensors files but no {INDEX} that lists them")
    if any(name.endswith((".bin", ".pt", ".pth", ".ckpt")) for name in names):
        raise NotReadable(
            "only pickled weights, which can run code when they are read; save them as "
            "safetensors (model.save_pretrained(…, safe_serialization=True))"
        )
    raise NotReadable("it contains no safetensors files")


def _indexed(storage: Storage) -> list[str]:
    try:
        said = parse_json(storage.read(INDEX, most=_MOST_INDEX))
        files = sorted(set(said["weight_map"].values()))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise NotReadable(f"{INDEX} is not a safetensors index ({error})") from None
    for file in files:
        if not isinstance(file, str) or "/" in file or not file.endswith(_ENDING):
            raise NotReadable(f"{INDEX} names {file!r}, which is not a safetensors file beside it")
    if len(files) > _MOST_FILES:
        raise NotReadable(f"{INDEX} names {len(files)} files, more than {_MOST_FILES}")
    return files


def _header(storage: Storage, file: str, digest: Any) -> Iterator[tuple[str, Stored]]:
    size = storage.size(file)
    if size is None:
        raise NotReadable(f"{file} is missing")
    length = int.from_bytes(storage.read(file, 0, 8), "little")
    if length > min(_MOST_HEADER, size - 8):
        raise NotReadable(f"{file} is damaged or not safetensors (a header of {length:,} bytes)")
    data = storage.read(file, 8, length)
    begin = 8 + length
    digest.update(f"{file} {size} ".encode() + data + storage.read(file, begin, _PROBED))
    try:
        said = parse_json(data)
        for name, facts in said.items():
            if name != "__metadata__":
                yield name, _stored(file, name, facts, begin, size)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise NotReadable(f"{file} is damaged or not safetensors ({error!r})") from None


def _stored(file: str, name: str, facts: Any, begin: int, size: int) -> Stored:
    start, stop = facts["data_offsets"]
    shape = tuple(facts["shape"])
    if facts["dtype"] not in DTYPES:
        raise NotReadable(f"{name} in {file} has dtype {facts['dtype']}, which is not supported")
    if not all(isinstance(n, int) and n >= 0 for n in (*shape, start, stop)):
        raise NotReadable(f"{name} in {file} has an invalid shape or offset")
    stored = Stored(file, facts["dtype"], shape, begin + start)
    if stop - start != stored.num_bytes or begin + stop > size:
        raise NotReadable(f"{name} in {file} does not fit its offsets; the file may be truncated")
    return stored


def read_part(storage: Storage, stored: Stored, box: Box) -> torch.Tensor:
    """Read only the bytes of a part; from an object store, short gaps too."""
    ranges = [part.indices(size)[:2] for part, size in zip(box, stored.shape, strict=False)]
    ranges += [(0, size) for size in stored.shape[len(ranges) :]]
    sizes = [stop - start for start, stop in ranges]
    if not math.prod(sizes):
        return torch.empty(sizes, dtype=stored.torch_dtype)
    inner = _inner(ranges, stored.shape)
    run = math.prod(sizes[inner:]) * stored.torch_dtype.itemsize
    if inner and run < _SHORT and not isinstance(storage, LocalStorage):
        rows = (slice(*ranges[0]),)
        return read_part(storage, stored, rows)[(slice(None), *box[1:])]
    made = torch.empty(sizes, dtype=stored.torch_dtype)
    into = made.reshape(-1).view(torch.uint8).numpy()
    strides = [math.prod(stored.shape[i + 1 :]) for i in range(len(stored.shape))]
    first = ranges[inner][0] * strides[inner] if ranges else 0
    at = 0
    for outer in product(*(range(*each) for each in ranges[:inner])):
        begin = first + sum(i * stride for i, stride in zip(outer, strides, strict=False))
        start = stored.start + begin * stored.torch_dtype.itemsize
        for done in range(0, run, _AT_ONCE):
            length = min(_AT_ONCE, run - done)
            data = storage.read(stored.file, start + done, length)
            if len(data) != length:
                raise NotReadable(
                    f"{stored.file} ends {readable_bytes(length - len(data))} early; it has "
                    "changed since the run began"
                )
            into[at : at + length] = np.frombuffer(data, np.uint8)
            at += length
    return made


def _inner(ranges: list[tuple[int, int]], shape: tuple[int, ...]) -> int:
    """Return the first dimension from which a part is a contiguous run of bytes."""
    for dim in range(len(shape) - 1, 0, -1):
        if ranges[dim] != (0, shape[dim]):
            return dim
    return 0
