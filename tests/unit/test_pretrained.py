"""Safetensors read part by part: the right bytes, no others, and only what is what it says."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import TensorDataset

from drivetrain.checkpoint.storage import LocalStorage, Storage, storage_at
from drivetrain.core.errors import ConfigError
from drivetrain.train.history import History
from drivetrain.train.task import Task
from drivetrain.train.trainer import Trainer
from drivetrain.train.weights.pretrained import match
from drivetrain.train.weights.safetensors import NotReadable, open_folder, read_part


class Counting(LocalStorage):
    """Adds up what is read."""

    num_bytes = 0

    def read(self, *args: Any, **kwargs: Any) -> bytes:
        data = super().read(*args, **kwargs)
        self.num_bytes += len(data)
        return data


BOXES = [
    (),
    (slice(2, 5),),
    (slice(0, 6), slice(1, 3)),
    (slice(5, 6), slice(0, 4), slice(2, 5)),
    (slice(0, 6), slice(0, 4), slice(0, 1)),
    (slice(6, 6),),
]


@pytest.mark.parametrize("box", BOXES)
@pytest.mark.parametrize("is_remote", [False, True])
def test_a_part_is_that_part_and_nothing_else_is_read(
    box: tuple[slice, ...], is_remote: bool, tmp_path: Path
) -> None:
    whole = torch.randn(6, 4, 5).to(torch.bfloat16)
    tensors = {"other": torch.ones(3), "w": whole, "one": torch.tensor(7)}
    save_file(tensors, tmp_path / "model.safetensors")
    folder = open_folder(str(tmp_path))
    storage: Storage = Counting(tmp_path)
    if is_remote:
        memory = storage_at(f"memory://{tmp_path.name}")
        memory.put("model.safetensors", (tmp_path / "model.safetensors").read_bytes())
        assert open_folder(memory.address).tensors == folder.tensors
        storage = memory
    part = read_part(storage, folder.tensors["w"], box)
    assert torch.equal(part, whole[box])
    assert torch.equal(read_part(storage, folder.tensors["one"], ()), tensors["one"])
    if isinstance(storage, Counting):
        assert storage.num_bytes == part.nbytes + 8


def put(folder: Path, header: bytes, length: int | None = None, data: bytes = b"\0" * 64) -> None:
    size = struct.pack("<Q", len(header) if length is None else length)
    (folder / "model.safetensors").write_bytes(size + header + data)


def header(**facts: Any) -> bytes:
    said = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16], **facts}
    return json.dumps({"w": said}).encode()


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda at: put(at, b"{}", 2**62), "a header of"),
        (lambda at: put(at, b"[" * 9999), "damaged or not safetensors"),
        (lambda at: put(at, b"[1]"), "damaged or not safetensors"),
        (lambda at: put(at, header(data_offsets=[0, 2**40])), "does not fit its offsets"),
        (lambda at: put(at, header(data_offsets=[-16, 0])), "invalid shape or offset"),
        (lambda at: put(at, header(shape=[2**40])), "does not fit its offsets"),
        (lambda at: put(at, header(dtype="OBJECT")), "which is not supported"),
        (lambda at: (at / "pytorch_model.bin").write_bytes(b""), "pickled weights"),
        (lambda _: None, "contains no safetensors files"),
        (
            lambda at: (at / "model.safetensors.index.json").write_text(
                '{"weight_map": {"w": "../../secret.safetensors"}}'
            ),
            "not a safetensors file beside it",
        ),
        (
            lambda at: (at / "model.safetensors.index.json").write_text(
                '{"weight_map": {"w": "gone.safetensors"}}'
            ),
            "gone.safetensors is missing",
        ),
    ],
)
def test_what_is_not_what_it_says_is_refused(
    spoil: Callable[[Path], Any], said: str, tmp_path: Path
) -> None:
    spoil(tmp_path)
    with pytest.raises(NotReadable, match=said):
        open_folder(str(tmp_path))


class WithHead(nn.Module):
    base_model_prefix = "model"

    def __init__(self, num_classes: int = 3) -> None:
        super().__init__()
        self.model = nn.ModuleDict({"embed": nn.Embedding(8, 4), "norm": nn.BatchNorm1d(4)})
        self.head = nn.Linear(4, num_classes)


def test_what_does_not_fit_is_listed_unless_it_is_allowed(tmp_path: Path) -> None:
    base = WithHead().model.state_dict()  # without a head, and without the prefix
    save_file({**base, "extra": torch.ones(1)}, tmp_path / "model.safetensors")
    stored = open_folder(str(tmp_path)).tensors
    found, problems = match(WithHead(), stored, ())
    told = " ".join(str(problem) for problem in problems)
    assert "the files lack head.weight, head.bias" in told
    assert "no place for extra" in told
    found, problems = match(WithHead(), stored, ["head.*", "extra"])
    assert not problems
    assert set(found) == {f"model.{name}" for name in base}

    save_file(WithHead(5).state_dict(), tmp_path / "model.safetensors")
    stored = open_folder(str(tmp_path)).tensors
    _, problems = match(WithHead(), stored, ())
    assert "head.weight is (3, 4), in the files (5, 4)" in str(problems[0])
    found, problems = match(WithHead(), stored, ["head.*"])
    assert not problems
    assert "head.weight" not in found


def test_tied_weights_are_found_under_either_name(tmp_path: Path) -> None:
    model = nn.ModuleDict({"first": nn.Linear(4, 4), "second": nn.Linear(4, 4)})
    model["second"].weight = model["first"].weight
    state = {name: t.clone() for name, t in model.state_dict().items() if name != "first.weight"}
    save_file(state, tmp_path / "model.safetensors")
    found, problems = match(model, open_folder(str(tmp_path)).tensors, ())
    assert not problems
    assert found["first.weight"] == found["second.weight"]


def fit(folder: Path, name: str, steps: int, **more: Any) -> tuple[Trainer, History]:
    config = {
        "global_batch_size": 4,
        "max_steps": steps,
        "output_dir": folder,
        "name": name,
        "model": {"pretrained": str(folder / "files")},
        "optimization": {"learning_rate": 0.01},
        "checkpoint": {"every_steps": 2, **more},
        "record": {"progress": "none", "sinks": []},
    }
    data = TensorDataset(torch.randn(16, 4, generator=torch.Generator().manual_seed(1)))
    task = Task(lambda: nn.Linear(4, 2), lambda model, batch: model(batch[0]).square().mean())
    trainer = Trainer(task, config)
    return trainer, trainer.fit(data)


def test_a_run_that_has_a_checkpoint_does_without_the_files(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    half = torch.full((2, 4), 0.5, dtype=torch.bfloat16)
    state = {"weight": half, "bias": torch.zeros(2)}
    save_file(state, tmp_path / "files" / "model.safetensors")
    _, whole = fit(tmp_path, "whole", 4)
    _, begun = fit(tmp_path, "begun", 2)
    (tmp_path / "files" / "model.safetensors").unlink()
    _, resumed = fit(tmp_path, "resumed", 4, resume_from=str(begun.run_dir))
    assert resumed.losses[-2:] == whole.losses[-2:]
    with pytest.raises(ConfigError, match="contains no safetensors files"):
        fit(tmp_path, "new", 4)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError):
        fit(tmp_path, "from nothing", 4, resume_from=str(tmp_path / "empty"))
