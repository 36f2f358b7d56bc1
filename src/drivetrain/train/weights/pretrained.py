"""model.pretrained: each rank reads its own part of each tensor directly into place."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from drivetrain.checkpoint.storage import storage_at
from drivetrain.config.schema import Model
from drivetrain.core.bounded import one_line
from drivetrain.core.errors import ConfigError, DrivetrainError, Problem
from drivetrain.core.text import readable_bytes
from drivetrain.parallel.model import tensors_by_names
from drivetrain.parallel.world import World
from drivetrain.train.weights.adapters import base_name, is_new
from drivetrain.train.weights.placing import Weights
from drivetrain.train.weights.recording import Box, Part
from drivetrain.train.weights.safetensors import Folder, NotReadable, Stored, open_folder, read_part

_KEY = "model.pretrained"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_MOST_TOLD = 8


class PretrainedWeights:
    """Weights from files; tensors that the files lack come from `rest`, the model's own source."""

    def __init__(self, folder: Folder, found: Mapping[str, Stored], rest: Weights) -> None:
        self._folder = folder
        self._found = found
        self._rest = rest

    @contextmanager
    def opened(self) -> Iterator[Part]:
        """Context with a function that returns a part of a tensor; the copy into place casts it."""
        storage = storage_at(self._folder.address)
        with self._rest.opened() as rest:

            def part(name: str, box: Box) -> torch.Tensor:
                stored = self._found.get(name)
                return rest(name, box) if stored is None else read_part(storage, stored, box)

            yield part


def pretrained(
    model: nn.Module, rest: Weights, said: Model, world: World
) -> tuple[PretrainedWeights, str, str]:
    """Return the weights, a note on them and the files' fingerprint. Collective.

    Raises:
        ConfigError: On every rank, with all tensors that are missing, unexpected or of a different
            shape.
    """
    folder = _open(str(said.pretrained), world)
    found, problems = match(model, folder.tensors, said.pretrained_allow)
    if problems:
        raise ConfigError(problems)
    weights = PretrainedWeights(folder, found, rest)
    size = sum(stored.num_bytes for stored in folder.tensors.values())
    note = (
        f"model: pretrained weights from {folder.address} ({len(folder.tensors)} tensors, "
        f"{readable_bytes(size)}, fingerprint {folder.fingerprint})"
    )
    new = [name for name, _ in model.named_parameters() if name not in found]
    if new:
        note += f"; initialised here: {_listed(new)}"
    return weights, note, folder.fingerprint


def _open(address: str, world: World) -> Folder:
    """Read the headers on rank 0 and send them to the others, as all would read the same."""
    said: dict[str, Any] = {}
    if world.is_main or world.mesh is None:
        try:
            said = open_folder(_local(address)).to_json()
        except (NotReadable, OSError, DrivetrainError) as error:
            said = {"problem": one_line(error)}
    said = json.loads(world.agree(json.dumps(said)))
    if "problem" in said:
        remedy = "give a folder of safetensors (Hugging Face layout), a file, or a hub id"
        raise ConfigError([Problem(_KEY, said["problem"], remedy, address)])
    folder = Folder.from_json(said)
    local = _local(address)
    # every node has its own copy of the hub's files
    return folder if local == address else replace(folder, address=local)


def _local(address: str) -> str:
    """Return the local folder of a hub id, downloading it if needed; others unchanged."""
    if "://" in address or Path(address).exists() or not _HUB_ID.fullmatch(address):
        return address
    if find_spec("huggingface_hub") is None:
        raise NotReadable("no such folder, and hub ids need `pip install huggingface_hub`")
    from huggingface_hub import snapshot_download

    try:
        return str(snapshot_download(address, allow_patterns=["*.safetensors", "*.index.json"]))
    except Exception as error:  # its own errors and those of its network library
        raise NotReadable(f"no such folder, and the hub reports: {one_line(error)}") from error


def match(
    model: nn.Module, stored: Mapping[str, Stored], allow: Iterable[str]
) -> tuple[dict[str, Stored], list[Problem]]:
    """Match the model's tensors with those of the files; return problems for the rest."""
    allow = tuple(allow)
    found: dict[str, Stored] = {}
    used: set[str] = set()
    missing: list[str] = []
    other_shape: list[tuple[str, Any, Any]] = []
    for names, tensor in tensors_by_names(model):
        here = [at for name in names for at in _spellings(model, name) if at in stored]
        used.update(here)
        shape = tuple(tensor.shape)
        if not here:
            missing += [] if is_new(model, names[0]) else [names[0]]
        elif stored[here[0]].shape != shape:
            other_shape.append((names[0], shape, stored[here[0]].shape))
        else:
            found |= dict.fromkeys(names, stored[here[0]])
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    unexpected = [
        name
        for name in stored
        if name not in used and not any(re.search(pattern, name) for pattern in ignored)
    ]
    return found, _problems(
        [name for name in missing if not _is_allowed(name, allow)],
        [name for name in unexpected if not _is_allowed(name, allow)],
        [each for each in other_shape if not _is_allowed(each[0], allow)],
    )


def _spellings(model: nn.Module, name: str) -> list[str]:
    """Return possible names in the files: a base model may be saved with or without a prefix."""
    name = base_name(model, name)
    prefix = getattr(model, "base_model_prefix", "")
    if not prefix:
        return [name]
    return [name, name.removeprefix(f"{prefix}."), f"{prefix}.{name}"]


def _is_allowed(name: str, allow: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in allow)


def _problems(
    missing: list[str], unexpected: list[str], other_shape: list[tuple[str, Any, Any]]
) -> list[Problem]:
    remedy = "if intended, list it in model.pretrained_allow (patterns like head.*)"
    shapes = [f"{name} is {here}, in the files {there}" for name, here, there in other_shape]
    found = [
        ("the files lack", missing),
        ("the model has no place for", unexpected),
        ("of a different shape:", shapes),
    ]
    return [
        Problem(_KEY, f"{rule} {_listed(names)}", remedy, has_value=False)
        for rule, names in found
        if names
    ]


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_TOLD} more" if len(names) > _MOST_TOLD else ""
    return ", ".join(names[:_MOST_TOLD]) + more
