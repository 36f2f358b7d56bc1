"""Weights as safetensors in a folder, named and split as Hugging Face's libraries do it."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from drivetrain.core.requirements import require

MAX_SHARD_BYTES = 5 * 10**9
INDEX = "model.safetensors.index.json"


class WeightFiles:
    """Written file by file as tensors come, so that no more than one file's are in memory.

    A tensor that is larger than `max_bytes` has a file of its own.
    """

    def __init__(self, folder: Path, max_bytes: int = MAX_SHARD_BYTES) -> None:
        self._save = require("safetensors.torch", extra="export").save_file
        self.folder = folder
        self._max_bytes = max_bytes
        self._open: dict[str, torch.Tensor] = {}
        self._open_bytes = 0
        self._written: list[list[str]] = []
        """The names in each file."""
        self.num_bytes = 0

    @property
    def num_tensors(self) -> int:
        """Those that are not in a file yet included."""
        return sum(map(len, self._written)) + len(self._open)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """The next one; it is copied, and may change after this."""
        if self._open and self._open_bytes + tensor.nbytes > self._max_bytes:
            self._write()
        self._open[name] = tensor.detach().to(
            "cpu", copy=True, memory_format=torch.contiguous_format
        )
        self._open_bytes += tensor.nbytes
        self.num_bytes += tensor.nbytes

    def finish(self) -> list[str]:
        """The files' names; with several, the last is their index."""
        if self._open or not self._written:
            self._write()
        names = _file_names(len(self._written))
        for number, name in enumerate(names):
            (self.folder / _unnamed(number)).rename(self.folder / name)
        if len(names) == 1:
            return names
        where = {
            name: file for file, held in zip(names, self._written, strict=True) for name in held
        }
        index = {"metadata": {"total_size": self.num_bytes}, "weight_map": where}
        (self.folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        return [*names, INDEX]

    def _write(self) -> None:
        path = self.folder / _unnamed(len(self._written))
        self._save(self._open, path, metadata={"format": "pt"})
        # safetensors makes files that only their owner may read; these are as open as the folder
        path.chmod(self.folder.stat().st_mode & 0o666)
        self._written.append(list(self._open))
        self._open, self._open_bytes = {}, 0


def _unnamed(number: int) -> str:
    """Until it is known how many there are."""
    return f".{number:05d}.partial"


def _file_names(num_files: int) -> list[str]:
    if num_files == 1:
        return ["model.safetensors"]
    return [f"model-{n:05d}-of-{num_files:05d}.safetensors" for n in range(1, num_files + 1)]
