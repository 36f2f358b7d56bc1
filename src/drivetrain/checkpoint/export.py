"""Export: the weights of a checkpoint as files that other libraries read.

    export_weights(place, manifest, Path("gpt"))       # a folder in Hugging Face's format
    export_weights(place, manifest, Path("gpt.pt"))    # one file for torch.load

Names are the model's own. A folder is made shard by shard, so memory stays near one shard; what is
read is held to its checksums, and the target appears whole or not at all.
"""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from drivetrain.checkpoint.manifest import Manifest
from drivetrain.checkpoint.storage import Storage
from drivetrain.checkpoint.whole_tensors import WholeTensors
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.core.requirements import require

PREFIX = "model."
MAX_SHARD_BYTES = 5 * 10**9
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Exported:
    """What was written."""

    num_tensors: int
    num_bytes: int
    files: tuple[str, ...]


def export_weights(
    place: Storage, manifest: Manifest, target: Path, max_shard_bytes: int = MAX_SHARD_BYTES
) -> Exported:
    """Write a checkpoint's weights to `target`: a .pt file, or a folder of safetensors."""
    _check_free(target)
    tensors = WholeTensors(place, manifest)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        if target.suffix == ".pt":
            exported = _write_file(tensors, partial, target.name)
        else:
            exported = _write_folder(tensors, partial, max_shard_bytes)
        partial.replace(target)
    finally:
        _remove(partial)
    return exported


def split(sizes: Sequence[tuple[str, int]], max_bytes: int) -> list[list[str]]:
    """Names in shards of at most `max_bytes`, in order; what is larger stands alone."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes:
        if shards[-1] and filled + size > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _write_file(tensors: WholeTensors, path: Path, name: str) -> Exported:
    names = _model_names(tensors)
    torch.save({name.removeprefix(PREFIX): tensors.read(name) for name in names}, path)
    return Exported(len(names), _total(tensors, names), (name,))


def _write_folder(tensors: WholeTensors, folder: Path, max_bytes: int) -> Exported:
    save_file = require("safetensors.torch", extra="export").save_file
    names = _model_names(tensors)
    shards = split([(name, tensors.num_bytes(name)) for name in names], max_bytes)
    files = _file_names(len(shards))
    folder.mkdir()
    for file, shard in zip(files, shards, strict=True):
        weights = {name.removeprefix(PREFIX): tensors.read(name) for name in shard}
        save_file(weights, folder / file, metadata={"format": "pt"})
        # safetensors makes files that only their owner may read; these are as open as the folder
        (folder / file).chmod(folder.stat().st_mode & 0o666)
    total = _total(tensors, names)
    if len(files) > 1:
        where = {
            name.removeprefix(PREFIX): file
            for file, shard in zip(files, shards, strict=True)
            for name in shard
        }
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        files = [*files, INDEX]
    return Exported(len(names), total, tuple(files))


def _file_names(num_shards: int) -> list[str]:
    if num_shards == 1:
        return ["model.safetensors"]
    return [f"model-{n:05d}-of-{num_shards:05d}.safetensors" for n in range(1, num_shards + 1)]


def _model_names(tensors: WholeTensors) -> list[str]:
    return [name for name in tensors.names() if name.startswith(PREFIX)]


def _total(tensors: WholeTensors, names: Sequence[str]) -> int:
    return sum(tensors.num_bytes(name) for name in names)


def _check_free(target: Path) -> None:
    if target.exists():
        raise ConfigError(
            [Problem("target", "exists already", "remove it, or give a new name", str(target))]
        )


def _remove(partial: Path) -> None:
    if partial.is_dir():
        shutil.rmtree(partial, ignore_errors=True)
    else:
        partial.unlink(missing_ok=True)
