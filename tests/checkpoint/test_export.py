"""Exports: what is written, and read again."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.checkpoint import export
from drivetrain.checkpoint.export import Exported, SharedExport, export_weights
from drivetrain.checkpoint.manifest import DamagedCheckpoint
from drivetrain.checkpoint.storage import LocalStorage
from drivetrain.checkpoint.weight_files import INDEX
from drivetrain.cli import checkpoint as verbs
from drivetrain.core.errors import ConfigError
from tests.checkpoint.parts import DATA, tensors, written

safetensors: Any = pytest.importorskip("safetensors.torch")


def test_weights_are_exported_by_their_own_names(tmp_path: Path) -> None:
    store, manifest = written(tmp_path / "run", tensors())
    target = tmp_path / "out" / "gpt"
    assert export_weights(store, manifest, target) == Exported(2, 32, ("model.safetensors",))
    found = safetensors.load_file(target / "model.safetensors")
    assert {name: each.tolist() for name, each in found.items()} == {
        "a": [0.0, 1.0, 2.0, 3.0],
        "b": [1, 1],
    }
    assert [path.name for path in target.parent.iterdir()] == ["gpt"], "nothing half is left"


def test_averages_take_the_place_of_the_weights_they_are_of(tmp_path: Path) -> None:
    store, manifest = written(tmp_path / "run", tensors())
    export_weights(store, manifest, tmp_path / "gpt.pt", averages=True)
    found = torch.load(tmp_path / "gpt.pt", weights_only=True)
    assert found["a"].tolist() == [7.0] * 4
    assert found["b"].tolist() == [1, 1]
    store, manifest = written(tmp_path / "without", {"model.a": torch.ones(1)})
    with pytest.raises(ConfigError) as caught:
        export_weights(store, manifest, tmp_path / "none", averages=True)
    assert str(caught.value) == (
        f"--ema: {manifest.folder} has no averaged weights; train with the EMA hook"
    )


@pytest.mark.parametrize(
    ("name", "form", "is_file"),
    [
        *(("gpt", "auto", False), ("gpt.pt", "auto", True), ("gpt", "pt", True)),
        *(("gpt.pt", "safetensors", False), ("gpt.safetensors", "safetensors", False)),
    ],
)
def test_the_form_goes_by_what_is_said_and_else_by_the_name(
    tmp_path: Path, name: str, form: Any, is_file: bool
) -> None:
    store, manifest = written(tmp_path / "run", tensors())
    store.put("huggingface/config.json", b"{}")
    exported = export_weights(store, manifest, tmp_path / name, form=form)
    assert (tmp_path / name).is_file() is is_file
    if is_file:
        assert exported == Exported(2, 32, (name,))
    else:
        has_config = form == "auto"
        assert exported.files == ("model.safetensors", *(["config.json"] if has_config else []))
        assert (tmp_path / name / "config.json").exists() is has_config


def test_several_files_have_an_index_before_the_models_own(tmp_path: Path) -> None:
    store, manifest = written(tmp_path / "run", tensors())
    store.put("huggingface/config.json", b"{}")
    exported = export_weights(store, manifest, tmp_path / "gpt", 16, "huggingface")
    names = tuple(f"model-{n:05d}-of-00002.safetensors" for n in (1, 2))
    assert exported.files == (*names, INDEX, "config.json")
    assert json.loads((tmp_path / "gpt" / INDEX).read_text())["weight_map"] == {
        "a": names[0],
        "b": names[1],
    }


def test_what_cannot_be_exported_as_asked_says_why(tmp_path: Path) -> None:
    store, manifest = written(tmp_path / "run", tensors())
    remedy = "use --format safetensors, and load it with your model's own code"
    with pytest.raises(ConfigError) as caught:
        export_weights(store, manifest, tmp_path / "gpt", form="huggingface")
    assert str(caught.value) == (
        f"--format = huggingface: {store.address} holds no config of a Hugging Face model; {remedy}"
    )
    store.put("huggingface/config.json", b"{}")
    part = written(tmp_path / "part", tensors(), contents="trained")[1]
    with pytest.raises(ConfigError) as caught:
        export_weights(store, part, tmp_path / "gpt", form="huggingface")
    assert str(caught.value) == (
        f"--format = huggingface: {part.folder} holds trained weights only (checkpoint.contents: "
        f"trained); {remedy}"
    )
    (tmp_path / "there").touch()
    with pytest.raises(ConfigError) as caught:
        export_weights(store, manifest, tmp_path / "there")
    assert str(caught.value).startswith("target = ")
    assert str(caught.value).endswith(": already exists; remove it, or choose another name")


@pytest.mark.parametrize(
    ("form", "name", "said"),
    [
        ("auto", "gpt.safetensors", "gpt for the folder, or {folder}/gpt.pt for a file"),
        ("safetensors", "gpt.bin", "gpt for the folder, or {folder}/gpt.pt for a file"),
    ],
)
def test_a_folder_does_not_get_the_name_of_a_file(
    tmp_path: Path, form: Any, name: str, said: str
) -> None:
    written(tmp_path / "run", tensors())
    target = tmp_path / name
    with pytest.raises(ConfigError) as caught:
        verbs.export(str(tmp_path / "run"), str(target), None, 5.0, form)
    assert "the name of a file, but a folder is written" in str(caught.value)
    assert str(caught.value).endswith(said.format(folder=tmp_path))
    assert not target.exists()


@pytest.mark.parametrize("inside", ["gpt.pt", "new/gpt.pt", "new/gpt"])
def test_a_target_that_cannot_be_written_is_named(tmp_path: Path, inside: str) -> None:
    written(tmp_path / "run", tensors())
    (tmp_path / "file").touch()
    target = str(tmp_path / "file" / inside)
    with pytest.raises(
        ConfigError, match=r"^TARGET = .*: cannot be written \(.*\); choose a place"
    ):
        verbs.export(str(tmp_path / "run"), target, None, 5.0)


def test_a_full_disk_is_no_fault_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    written(tmp_path / "run", tensors())
    monkeypatch.setattr(export, "export_weights", full)
    with pytest.raises(ConfigError, match="cannot be written \\(No space left on device\\)"):
        verbs.export(str(tmp_path / "run"), str(tmp_path / "gpt"), None, 5.0)


@pytest.mark.parametrize("name", ["gpt", "gpt.pt"])
def test_an_export_that_fails_leaves_nothing(tmp_path: Path, name: str) -> None:
    store, manifest = written(tmp_path / "run", tensors())
    store.put(f"{manifest.folder}/{DATA}", b"x" * manifest.files[0].size)
    with pytest.raises(DamagedCheckpoint, match=rf"^{DATA} is damaged at model\.[ab]$"):
        export_weights(store, manifest, tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize(("least", "num_files"), [(1, 2), (10**9, 1)])
def test_writers_share_an_export_and_the_last_adds_the_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, least: int, num_files: int
) -> None:
    monkeypatch.setattr(export, "LEAST_SHARD_BYTES", least)
    store, manifest = written(tmp_path / "run", tensors())
    target = LocalStorage(tmp_path / "run")
    target.put("huggingface/config.json", b"{}")
    shared = [SharedExport(store, manifest, 2) for _ in range(2)]
    names = [f"model-{n:05d}-of-{num_files:05d}.safetensors" for n in range(1, num_files + 1)]
    assert [file.name for file in shared[0].files] == names
    shared[1].write(target, "weights", 1)
    assert target.names("weights") == names[1:]
    shared[0].write(target, "weights", 0)
    shared[0].finish(target, "weights")
    assert target.names("weights") == sorted([*names, INDEX, "config.json"])
    found: dict[str, Any] = {}
    for name in names:
        found |= safetensors.load_file(tmp_path / "run/weights" / name)
    assert {name: each.tolist() for name, each in found.items()} == {
        "a": [0.0, 1.0, 2.0, 3.0],
        "b": [1, 1],
    }
    index = json.loads(target.read(f"weights/{INDEX}"))
    assert index["metadata"]["total_size"] == 32
