"""Export: the weights of a checkpoint as files that other libraries read.

    export_weights(storage, manifest, Path("gpt"))       # a folder in Hugging Face's format
    export_weights(storage, manifest, Path("gpt.pt"))    # one file for torch.load

For a Hugging Face model the folder also holds its config, so `from_pretrained` can read it. Names
are those of the model. Data is streamed from the checkpoint's files to the new ones, so memory does
not grow with the model. Checksums are verified while reading, and the target appears complete or
not at all.
"""

from __future__ import annotations

import shutil
import uuid
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.serialization import skip_data

from drivetrain.checkpoint.companions import CONFIG, kept
from drivetrain.checkpoint.manifest import Manifest
from drivetrain.checkpoint.storage import LocalStorage, Storage
from drivetrain.checkpoint.weight_files import (
    INDEX,
    MAX_SHARD_BYTES,
    Tensor,
    index_of,
    split,
)
from drivetrain.checkpoint.whole_tensors import WholeTensors
from drivetrain.checkpoint.zip_sums import set_sums
from drivetrain.core.errors import ConfigError, Problem

LEAST_SHARD_BYTES = 10**9
"""Minimum size of a file when ranks share the work, which limits how many ranks write."""
PREFIX, AVERAGES = "model.", "ema."
Form = Literal["auto", "huggingface", "safetensors", "pt"]
"""auto: by the target's name, and with the Hugging Face model's files if there are any."""


@dataclass(frozen=True)
class Exported:
    """The result of an export."""

    num_tensors: int
    num_bytes: int
    files: tuple[str, ...]


def export_weights(
    storage: Storage,
    manifest: Manifest,
    target: Path,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    form: Form = "auto",
    *,
    averages: bool = False,
) -> Exported:
    """Write a checkpoint's weights to `target`: a .pt file, or a folder of safetensors.

    `averages`: use the EMA of each weight that has one.
    """
    _check_free(target)
    companions = _companions(storage, manifest, form)
    tensors = WholeTensors(storage, manifest)
    sources = _sources(tensors, manifest, averages=averages)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        if form == "pt" or (form == "auto" and target.suffix == ".pt"):
            exported = _write_file(tensors, sources, partial, target.name)
        else:
            exported = _write_folder(tensors, sources, partial, max_shard_bytes, companions)
        partial.replace(target)
    finally:
        _remove(partial)
    return exported


class SharedExport:
    """Exports a checkpoint's weights to a folder, with several ranks writing different files.

    Each rank creates one from the same checkpoint, and all of them compute the same list of files.
    The folder is complete once it has its index.
    """

    def __init__(self, storage: Storage, manifest: Manifest, num_writers: int) -> None:
        self._manifest = manifest
        self._tensors = WholeTensors(storage, manifest)
        self._sources = _sources(self._tensors, manifest, averages=False)
        size = sum(map(self._tensors.num_bytes, self._sources.values()))
        most = min(MAX_SHARD_BYTES, max(LEAST_SHARD_BYTES, size // num_writers))
        named = (each for _, each in _named(self._tensors, self._sources))
        self.files = split(named, most, is_indexed=True)
        self._num_writers = num_writers

    def write(self, target: Storage, folder: str, writer: int) -> None:
        """Write this writer's share of the files; writers count from 0."""
        for file in self.files[writer :: self._num_writers]:
            with target.writing(f"{folder}/{file.name}") as stream:
                file.write(stream, lambda name: self._tensors.stream(self._sources[name]))

    def finish(self, target: Storage, folder: str) -> None:
        """Write the Hugging Face model's files and the index, once all writers are done."""
        for name, data in _companions(target, self._manifest, "auto").items():
            target.put(f"{folder}/{name}", data)
        target.put(f"{folder}/{INDEX}", index_of(self.files))


def _companions(storage: Storage, manifest: Manifest, form: Form) -> dict[str, bytes]:
    is_partial = manifest.contents == "trained"  # from_pretrained would randomize the rest
    found = {} if form in ("safetensors", "pt") or is_partial else kept(storage)
    if form == "huggingface" and CONFIG not in found:
        rule = f"{storage.address} holds no config of a Hugging Face model"
        if is_partial:
            rule = f"{manifest.folder} holds trained weights only (checkpoint.contents: trained)"
        remedy = "use --format safetensors, and load it with your model's own code"
        raise ConfigError([Problem("--format", rule, remedy, form)])
    return found


def _sources(tensors: WholeTensors, manifest: Manifest, *, averages: bool) -> dict[str, str]:
    """Map the name each weight is written under to the name of its stored tensor."""
    names = tensors.names()
    found = {n.removeprefix(PREFIX): n for n in names if n.startswith(PREFIX)}
    averaged = {n.removeprefix(AVERAGES): n for n in names if n.startswith(AVERAGES)}
    if averages and not averaged:
        rule, remedy = f"{manifest.folder} has no averaged weights", "train with the EMA hook"
        raise ConfigError([Problem("--ema", rule, remedy, has_value=False)])
    return {**found, **averaged} if averages else found


def _write_file(
    tensors: WholeTensors, sources: Mapping[str, str], path: Path, name: str
) -> Exported:
    """Write what torch.save would, filling in the tensors' bytes later (torch's `skip_data`)."""
    with FakeTensorMode():
        empty = {n: torch.empty(t.shape, dtype=t.dtype) for n, t in _named(tensors, sources)}
    # given a path, torch would write its name into the file, and no two files would be equal
    with skip_data(materialize_fake_tensors=True), path.open("wb") as stream:
        torch.save(empty, stream)
    with FakeTensorMode():
        places = torch.load(path, weights_only=True)
    sums = {}
    with path.open("r+b") as file:
        for written, source in sources.items():
            start = places[written].untyped_storage()._checkpoint_offset  # noqa: SLF001
            file.seek(start)
            found = 0
            for data in tensors.stream(source):
                file.write(data)
                found = zlib.crc32(data, found)
            sums[start] = found
    set_sums(path, sums)
    total = sum(map(tensors.num_bytes, sources.values()))
    return Exported(len(sources), total, (name,))


def _write_folder(
    tensors: WholeTensors,
    sources: Mapping[str, str],
    folder: Path,
    max_shard_bytes: int,
    companions: Mapping[str, bytes],
) -> Exported:
    files = split((each for _, each in _named(tensors, sources)), max_shard_bytes)
    into = LocalStorage(folder)
    for file in files:
        with into.writing(file.name) as stream:
            file.write(stream, lambda name: tensors.stream(sources[name]))
    others = dict(companions)
    if len(files) > 1:
        others = {INDEX: index_of(files), **others}
    for name, data in others.items():
        into.put(name, data)
    total = sum(map(tensors.num_bytes, sources.values()))
    return Exported(len(sources), total, (*(file.name for file in files), *others))


def _named(tensors: WholeTensors, sources: Mapping[str, str]) -> Iterator[tuple[str, Tensor]]:
    for name, source in sources.items():
        yield name, Tensor(name, tensors.dtype(source), tensors.shape(source))


def _check_free(target: Path) -> None:
    if target.exists():
        raise ConfigError(
            [Problem("target", "already exists", "remove it, or choose another name", str(target))]
        )


def _remove(partial: Path) -> None:
    if partial.is_dir():
        shutil.rmtree(partial, ignore_errors=True)
    else:
        partial.unlink(missing_ok=True)
