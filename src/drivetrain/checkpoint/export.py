"""Export: the weights of a checkpoint as files that other libraries read.

    export_weights(place, manifest, Path("gpt"))       # a folder in Hugging Face's format
    export_weights(place, manifest, Path("gpt.pt"))    # one file for torch.load

Where the model was one of Hugging Face's, the folder has its config, too, and `from_pretrained`
reads it. Names are the model's own. A folder is made shard by shard, so memory stays near one
shard; what is read is held to its checksums, and the target appears whole or not at all.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from drivetrain.checkpoint.companions import CONFIG, kept
from drivetrain.checkpoint.manifest import Manifest
from drivetrain.checkpoint.storage import Storage
from drivetrain.checkpoint.weight_files import MAX_SHARD_BYTES, WeightFiles
from drivetrain.checkpoint.whole_tensors import WholeTensors
from drivetrain.core.errors import ConfigError, Problem

PREFIX, AVERAGES = "model.", "ema."
Form = Literal["auto", "huggingface", "safetensors", "pt"]
"""auto: by the target's name, and with a Hugging Face model's files where there are any."""


@dataclass(frozen=True)
class Exported:
    """What was written."""

    num_tensors: int
    num_bytes: int
    files: tuple[str, ...]


def export_weights(
    place: Storage,
    manifest: Manifest,
    target: Path,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    form: Form = "auto",
    *,
    averages: bool = False,
) -> Exported:
    """Write a checkpoint's weights to `target`: a .pt file, or a folder of safetensors.

    `averages`: those of an EMA, where there is one of a weight.
    """
    _check_free(target)
    companions = _companions(place, manifest, form)
    tensors = WholeTensors(place, manifest)
    sources = _sources(tensors, manifest, averages=averages)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        if form == "pt" or (form == "auto" and target.suffix == ".pt"):
            exported = _write_file(tensors, sources, partial, target.name)
        else:
            files = WeightFiles(partial, max_shard_bytes)
            exported = _write_folder(tensors, sources, files, companions)
        partial.replace(target)
    finally:
        _remove(partial)
    return exported


def _companions(place: Storage, manifest: Manifest, form: Form) -> dict[str, bytes]:
    is_partial = manifest.contents == "trained"  # from_pretrained would draw the rest by lot
    found = {} if form in ("safetensors", "pt") or is_partial else kept(place)
    if form == "huggingface" and CONFIG not in found:
        rule = f"no config of a Hugging Face model was kept in {place.address}"
        if is_partial:
            rule = f"{manifest.folder} has only what was trained (checkpoint.contents: trained)"
        remedy = "use --format safetensors, and your model's own code to load it"
        raise ConfigError([Problem("--format", rule, remedy, form)])
    return found


def _sources(tensors: WholeTensors, manifest: Manifest, *, averages: bool) -> dict[str, str]:
    """By the name a weight is written under, that of the tensor it is read from."""
    names = tensors.names()
    found = {n.removeprefix(PREFIX): n for n in names if n.startswith(PREFIX)}
    averaged = {n.removeprefix(AVERAGES): n for n in names if n.startswith(AVERAGES)}
    if averages and not averaged:
        rule, remedy = f"{manifest.folder} has no averages", "train with the hook EMA"
        raise ConfigError([Problem("--ema", rule, remedy, has_value=False)])
    return {**found, **averaged} if averages else found


def _write_file(
    tensors: WholeTensors, sources: Mapping[str, str], path: Path, name: str
) -> Exported:
    torch.save({name: tensors.read(source) for name, source in sources.items()}, path)
    total = sum(map(tensors.num_bytes, sources.values()))
    return Exported(len(sources), total, (name,))


def _write_folder(
    tensors: WholeTensors,
    sources: Mapping[str, str],
    files: WeightFiles,
    companions: Mapping[str, bytes],
) -> Exported:
    files.folder.mkdir()
    for name, source in sources.items():
        files.add(name, tensors.read(source))
    names = files.finish()
    for name, data in companions.items():
        (files.folder / name).write_bytes(data)
    return Exported(files.num_tensors, files.num_bytes, (*names, *companions))


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
