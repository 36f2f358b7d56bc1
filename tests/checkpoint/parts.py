"""What the tests of checkpoints share."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from drivetrain.checkpoint import index_check
from drivetrain.checkpoint.checkpointer import Checkpointer, Saved
from drivetrain.checkpoint.manifest import NAME, File, Manifest, checksum, fingerprint
from drivetrain.checkpoint.state import TrainingState
from drivetrain.checkpoint.storage import LocalStorage
from drivetrain.checkpoint.weight_files import raw_bytes
from drivetrain.cluster.environments import Identity
from drivetrain.parallel.layout import Layout
from drivetrain.parallel.world import World


def tensors() -> dict[str, torch.Tensor]:
    return {
        "model.a": torch.arange(4.0),
        "model.b": torch.ones(2, dtype=torch.int64),
        "optimizer.a.step": torch.ones(1),
        "ema.a": torch.full((4,), 7.0),
    }


def metadata(tensor: torch.Tensor) -> Metadata:
    chunk = ChunkStorageMetadata(torch.Size([0]), tensor.shape)
    properties = TensorProperties(dtype=tensor.dtype)
    return Metadata({"a": TensorStorageMetadata(properties, tensor.shape, [chunk])})


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(2, 2), nn.BatchNorm1d(2)
        self.frozen = nn.Parameter(torch.ones(1), requires_grad=False)


def trained() -> tuple[Small, torch.optim.Optimizer]:
    model = Small()
    optimizer = torch.optim.AdamW(model.linear.parameters(), lr=0.1, betas=(0.8, 0.9))
    model.linear(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return model, optimizer


class Thing:
    """Has a state; may fail to give or take it."""

    def __init__(self, value: int = 0, error: Exception | None = None) -> None:
        self.value, self.error = value, error

    def state_dict(self) -> dict[str, Any]:
        if self.error is not None:
            raise self.error
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.error is not None:
            raise self.error
        self.value = state["value"]


def world() -> World:
    identity = Identity("test", 0, 0, 1, 1, 0, "127.0.0.1", 0)
    return World(identity, Layout(), torch.device("cpu"), None)


def run_state(value: int = 0) -> TrainingState:
    return TrainingState(*trained(), common={"run": Thing(value)}, own={"mine": Thing(value)})


def saved(saver: Checkpointer, step: int, state: TrainingState | None = None, **more: Any) -> Saved:
    saver.save(state or run_state(step), step, {"step": step}, **more)
    done = saver.wait()
    assert done is not None
    return done


DATA = "data-00000.bin"


def written(
    root: Path, tensors: Mapping[str, torch.Tensor], step: int = 4, **more: Any
) -> tuple[LocalStorage, Manifest]:
    """A whole checkpoint of these tensors."""
    manifest = Manifest(step, 1, {"dp_shard": 1}, "ddp", {"step": step}, **more)
    folder = root / manifest.folder
    folder.mkdir(parents=True)
    data, index = b"", {}
    for name, tensor in tensors.items():
        raw = bytes(raw_bytes(tensor))
        shape = list(tensor.shape)
        piece = [[0] * len(shape), shape, DATA, len(data), len(raw), checksum(raw)]
        dtype = str(tensor.dtype).removeprefix("torch.")
        index[name] = {"dtype": dtype, "size": shape, "chunks": [piece]}
        data += raw
    text = json.dumps(index).encode()
    (folder / DATA).write_bytes(data)
    (folder / index_check.NAME).write_bytes(text)
    files = (
        File(DATA, len(data), checksum(data)),
        File(index_check.NAME, len(text), checksum(text)),
    )
    manifest = replace(manifest, files=files)
    (folder / NAME).write_bytes(manifest.to_json())
    return LocalStorage(root), manifest


def entry(*chunks: Any, size: list[int] | None = None, dtype: str = "uint8") -> dict[str, Any]:
    return {"dtype": dtype, "size": size or [4], "chunks": list(chunks)}


def piece(at: int, size: int, start: int | None = None, file: str = "f") -> list[Any]:
    return [[at], [size], file, at if start is None else start, size, "0"]


def changed(**changes: Any) -> bytes:
    body = json.loads(Manifest(4, 1, {"dp": 2}, "ddp", {}).to_json())
    del body["self_crc32"]
    body |= changes
    return json.dumps({**body, "self_crc32": fingerprint(body)}).encode()
