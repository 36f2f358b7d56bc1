"""Weights as safetensors in a folder, named and split as Hugging Face's libraries do.

The format is a length, a JSON header and the tensors' bytes. It is written here as a stream, so
tensors need not be in memory: safetensors' own writer needs all tensors of a file at once, and with
torch's `HuggingFaceStorageWriter` rank 0 merges the ranks' files alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from drivetrain.core.errors import ConfigError, Problem

MAX_SHARD_BYTES = 5 * 10**9
INDEX = "model.safetensors.index.json"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""By safetensors' names."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Data = bytes | memoryview
Bytes = Callable[[str], Iterable[Data]]
"""Yields all bytes of the tensor with this name, in order."""


@dataclass(frozen=True)
class Tensor:
    """A tensor to be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class WeightFile:
    """A file's name and its tensors."""

    name: str
    tensors: tuple[Tensor, ...]

    def write(self, stream: BinaryIO, read: Bytes) -> None:
        """Write the header and the bytes; only one block from `read` is in memory at a time."""
        # widest dtypes first, as safetensors does, so that every tensor is aligned
        ordered = sorted(self.tensors, key=lambda tensor: (-tensor.dtype.itemsize, tensor.name))
        stream.write(_header(ordered))
        for tensor in ordered:
            written = sum(stream.write(data) for data in read(tensor.name))
            if written != tensor.num_bytes:
                raise RuntimeError(f"{tensor.name}: {written} bytes, not {tensor.num_bytes}")


def split(
    tensors: Iterable[Tensor], max_bytes: int, *, is_indexed: bool = False
) -> list[WeightFile]:
    """Fill files in order up to `max_bytes`; a larger tensor gets its own file.

    `is_indexed`: name a single file as if there were several, because it gets an index.
    """
    held: list[list[Tensor]] = [[]]
    size = 0
    for tensor in tensors:
        if held[-1] and size + tensor.num_bytes > max_bytes:
            held.append([])
            size = 0
        held[-1].append(tensor)
        size += tensor.num_bytes
    names = _file_names(len(held), is_indexed=is_indexed)
    return [WeightFile(name, tuple(each)) for name, each in zip(names, held, strict=True)]


def index_of(files: Sequence[WeightFile]) -> bytes:
    """Return the index: which tensor is in which file."""
    where = {tensor.name: file.name for file in files for tensor in file.tensors}
    total = sum(tensor.num_bytes for file in files for tensor in file.tensors)
    index = {"metadata": {"total_size": total}, "weight_map": where}
    return (json.dumps(index, indent=2) + "\n").encode()


class WeightFiles:
    """Writes files as tensors arrive, with at most one file's tensors in memory.

    For callers that do not know the tensors in advance.
    """

    def __init__(self, folder: Path, max_bytes: int = MAX_SHARD_BYTES) -> None:
        self.folder = folder
        self._max_bytes = max_bytes
        self._open: dict[str, torch.Tensor] = {}
        self._open_bytes = 0
        self._written: list[tuple[Tensor, ...]] = []
        """The tensors of each file."""

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Add a tensor; it is copied, so it may change afterwards."""
        if self._open and self._open_bytes + tensor.nbytes > self._max_bytes:
            self._write()
        self._open[name] = tensor.detach().to(
            "cpu", copy=True, memory_format=torch.contiguous_format
        )
        self._open_bytes += tensor.nbytes

    def finish(self) -> list[str]:
        """Write the rest and return the file names; if there are several, the last is the index."""
        if self._open or not self._written:
            self._write()
        names = _file_names(len(self._written))
        for number, name in enumerate(names):
            (self.folder / _unnamed(number)).rename(self.folder / name)
        if len(names) == 1:
            return names
        files = [WeightFile(*each) for each in zip(names, self._written, strict=True)]
        (self.folder / INDEX).write_bytes(index_of(files))
        return [*names, INDEX]

    def _write(self) -> None:
        held = tuple(Tensor(n, t.dtype, tuple(t.shape)) for n, t in self._open.items())
        name = _unnamed(len(self._written))
        with (self.folder / name).open("wb") as stream:
            WeightFile(name, held).write(stream, lambda each: [raw_bytes(self._open[each])])
        self._written.append(held)
        self._open, self._open_bytes = {}, 0


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the tensor's bytes, without a copy if it is contiguous and on the CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    data: Any = flat.view(torch.uint8).numpy()
    return memoryview(data)


def _header(tensors: Iterable[Tensor]) -> bytes:
    said: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for tensor, start in _placed(tensors):
        offsets = [start, start + tensor.num_bytes]
        dtype = _dtype_name(tensor)
        said[tensor.name] = {"dtype": dtype, "shape": tensor.shape, "data_offsets": offsets}
    text = json.dumps(said, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _placed(tensors: Iterable[Tensor]) -> Iterator[tuple[Tensor, int]]:
    start = 0
    for tensor in tensors:
        yield tensor, start
        start += tensor.num_bytes


def _dtype_name(tensor: Tensor) -> str:
    if tensor.dtype not in _NAMES:
        rule = f"has dtype {tensor.dtype}, which safetensors does not support"
        raise ConfigError([Problem(tensor.name, rule, "use --format pt", has_value=False)])
    return _NAMES[tensor.dtype]


def _unnamed(number: int) -> str:
    """Return the temporary name, used until the number of files is known."""
    return f".{number:05d}.partial"


def _file_names(num_files: int, *, is_indexed: bool = False) -> list[str]:
    if num_files == 1 and not is_indexed:
        return ["model.safetensors"]
    return [f"model-{n:05d}-of-{num_files:05d}.safetensors" for n in range(1, num_files + 1)]
