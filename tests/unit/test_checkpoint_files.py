"""What checkpoints are written with and read by, each by itself, in one process."""

from __future__ import annotations

import errno
import io
import json
import pickle
import random
import struct
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from drivetrain import __version__
from drivetrain.checkpoint import checkpointer as checkpointer_module
from drivetrain.checkpoint import export, lineage, shards, storage, tensor_index
from drivetrain.checkpoint.catalogue import read_manifest
from drivetrain.checkpoint.checkpointer import Checkpointer, Saved, versions
from drivetrain.checkpoint.compare import compare
from drivetrain.checkpoint.contract import Contract
from drivetrain.checkpoint.export import Exported, SharedExport, export_weights
from drivetrain.checkpoint.failures import RanksFailed
from drivetrain.checkpoint.frozen import FrozenBase
from drivetrain.checkpoint.gathered import GatheredState
from drivetrain.checkpoint.manifest import (
    NAME,
    DamagedCheckpoint,
    File,
    Manifest,
    checksum,
    folder_name,
)
from drivetrain.checkpoint.pins import pin
from drivetrain.checkpoint.shards import ShardReader, ShardWriter
from drivetrain.checkpoint.sharing import Held, Sharing, answers, homes_of, keys_of, own_share
from drivetrain.checkpoint.state import (
    TrainingState,
    Value,
    _random_state,
    _restore_groups,
    _restore_random,
    is_own,
    own_name,
    pack,
    plain,
    saved_groups,
    unpack,
)
from drivetrain.checkpoint.storage import LocalStorage, RemoteStorage, storage_at
from drivetrain.checkpoint.tensor_index import Piece
from drivetrain.checkpoint.weight_files import (
    INDEX,
    Tensor,
    WeightFile,
    WeightFiles,
    _header,
    index_of,
    raw_bytes,
    split,
)
from drivetrain.checkpoint.whole_tensors import WholeTensors
from drivetrain.cluster.environments import Identity
from drivetrain.config.schema import Checkpoint
from drivetrain.core.errors import ConfigError, EnvironmentProblem, NotSaved
from drivetrain.parallel.accelerator import accelerator_of
from drivetrain.parallel.layout import Layout
from drivetrain.parallel.world import World
from tests.unit.test_checkpoint_parts import DATA, written

safetensors: Any = pytest.importorskip("safetensors.torch")

# Weight files


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        *((torch.float64, "F64"), (torch.float32, "F32"), (torch.float16, "F16")),
        *((torch.bfloat16, "BF16"), (torch.float8_e4m3fn, "F8_E4M3"), (torch.complex64, "C64")),
        *((torch.float8_e5m2, "F8_E5M2"), (torch.int64, "I64"), (torch.int32, "I32")),
        *((torch.int16, "I16"), (torch.int8, "I8"), (torch.uint64, "U64"), (torch.bool, "BOOL")),
        *((torch.uint32, "U32"), (torch.uint16, "U16"), (torch.uint8, "U8")),
    ],
)
def test_a_header_says_what_a_tensor_is_and_where(dtype: torch.dtype, name: str) -> None:
    data = _header([Tensor("a", dtype, (2, 3)), Tensor("b", dtype, ())])
    (length,) = struct.unpack("<Q", data[:8])
    assert length == len(data) - 8
    assert length % 8 == 0
    size = dtype.itemsize
    assert json.loads(data[8:]) == {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": name, "shape": [2, 3], "data_offsets": [0, 6 * size]},
        "b": {"dtype": name, "shape": [], "data_offsets": [6 * size, 7 * size]},
    }
    assert data[8:].rstrip(b" ").endswith(b"}")
    assert b" " not in data[8:].rstrip(b" "), "as small as safetensors writes it"


def test_a_number_format_that_safetensors_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        _header([Tensor("a", torch.complex128, (1,))])
    assert str(caught.value) == (
        "a: is in torch.complex128, which safetensors does not have; use --format pt"
    )


def test_one_file_has_a_name_of_its_own_unless_there_is_an_index() -> None:
    tensors = [Tensor("a", torch.int8, (2,)), Tensor("b", torch.int8, (2,))]
    assert [file.name for file in split(tensors, 4)] == ["model.safetensors"]
    assert [file.name for file in split(tensors, 4, is_indexed=True)] == [
        "model-00001-of-00001.safetensors"
    ]
    assert split([], 4) == [WeightFile("model.safetensors", ())]
    two = split(tensors, 3)
    assert [file.name for file in two] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    assert index_of(two).decode() == (
        '{\n  "metadata": {\n    "total_size": 4\n  },\n  "weight_map": {\n'
        '    "a": "model-00001-of-00002.safetensors",\n'
        '    "b": "model-00002-of-00002.safetensors"\n  }\n}\n'
    )


def test_files_are_written_as_tensors_come_each_as_full_as_it_may_be(tmp_path: Path) -> None:
    tensors = {name: torch.full((size,), float(size)) for name, size in (("a", 1), ("b", 2))}
    tensors |= {"c": torch.arange(6.0).view(2, 3).t(), "d": torch.ones(1)}
    files = WeightFiles(tmp_path, max_bytes=12)
    for name, tensor in tensors.items():
        files.add(name, tensor)
    names = [f"model-{n:05d}-of-00003.safetensors" for n in (1, 2, 3)]
    assert files.finish() == [*names, INDEX]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*names, INDEX])
    found = [safetensors.load_file(tmp_path / name) for name in names]
    assert [sorted(each) for each in found] == [["a", "b"], ["c"], ["d"]]
    for each in found:
        for name, tensor in each.items():
            assert torch.equal(tensor, tensors[name])
    index = json.loads((tmp_path / INDEX).read_bytes())
    assert index["metadata"]["total_size"] == 4 * 10
    assert index["weight_map"]["c"] == names[1]


def test_no_tensors_are_a_file_too(tmp_path: Path) -> None:
    assert WeightFiles(tmp_path).finish() == ["model.safetensors"]
    assert safetensors.load_file(tmp_path / "model.safetensors") == {}


def test_bytes_of_a_tensor_are_its_numbers_in_order() -> None:
    turned = torch.arange(4, dtype=torch.uint8).view(2, 2).t()
    assert bytes(raw_bytes(turned)) == bytes([0, 2, 1, 3])
    assert bytes(raw_bytes(torch.ones(2, requires_grad=True))) == struct.pack("<2f", 1, 1)
    assert bytes(raw_bytes(torch.ones(0))) == b""


# Export


def tensors() -> dict[str, torch.Tensor]:
    return {
        "model.a": torch.arange(4.0),
        "model.b": torch.ones(2, dtype=torch.int64),
        "optimizer.a.step": torch.ones(1),
        "ema.a": torch.full((4,), 7.0),
    }


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
        f"--ema: {manifest.folder} has no averages; train with the hook EMA"
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
    remedy = "use --format safetensors, and your model's own code to load it"
    with pytest.raises(ConfigError) as caught:
        export_weights(store, manifest, tmp_path / "gpt", form="huggingface")
    assert str(caught.value) == (
        f"--format = huggingface: no config of a Hugging Face model was kept in {store.address}; "
        f"{remedy}"
    )
    store.put("huggingface/config.json", b"{}")
    part = written(tmp_path / "part", tensors(), contents="trained")[1]
    with pytest.raises(ConfigError) as caught:
        export_weights(store, part, tmp_path / "gpt", form="huggingface")
    assert str(caught.value) == (
        f"--format = huggingface: {part.folder} has only what was trained (checkpoint.contents: "
        f"trained); {remedy}"
    )
    (tmp_path / "there").touch()
    with pytest.raises(ConfigError) as caught:
        export_weights(store, manifest, tmp_path / "there")
    assert str(caught.value).startswith("target = ")
    assert str(caught.value).endswith(": exists already; remove it, or give a new name")


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


# Whole tensors, and pieces


def test_a_checkpoints_tensors_have_names_shapes_and_sizes(tmp_path: Path) -> None:
    found = WholeTensors(*written(tmp_path, tensors()))
    assert found.names() == list(tensors())
    assert (found.shape("model.b"), found.dtype("model.b")) == ((2,), torch.int64)
    assert found.num_bytes("model.b") == 16
    assert found.read("model.a").tolist() == [0.0, 1.0, 2.0, 3.0]
    assert b"".join(map(bytes, found.stream("model.b"))) == struct.pack("<2q", 1, 1)


def test_a_piece_comes_some_bytes_at_a_time_and_is_held_to_its_sum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "_AT_ONCE", 6)
    store, manifest = written(tmp_path, {"a": torch.arange(4.0), "none": torch.ones(0)})
    reader = ShardReader(store, manifest)
    index = MetadataIndex("a", (0,))
    assert [len(each) for each in reader.stream(index)] == [6, 6, 4]
    assert b"".join(reader.stream(index)) == struct.pack("<4f", 0, 1, 2, 3)
    assert list(reader.stream(MetadataIndex("none", (0,)))) == []
    assert reader.tensor(MetadataIndex("none", (0,))).shape == (0,)
    store.put(f"{manifest.folder}/{DATA}", struct.pack("<4f", 0, 1, 2, 4))
    for read in (lambda: list(reader.stream(index)), lambda: reader.tensor(index)):
        with pytest.raises(DamagedCheckpoint, match=f"^{DATA} is damaged at a$"):
            read()
    store.remove(f"{manifest.folder}/{DATA}")
    for read in (lambda: list(reader.stream(index)), lambda: reader.tensor(index)):
        with pytest.raises(DamagedCheckpoint, match=f"^{DATA} is missing$"):
            read()


def test_an_index_that_is_not_the_manifests_is_damage(tmp_path: Path) -> None:
    store, manifest = written(tmp_path, tensors())
    reader = ShardReader(store, manifest)
    assert reader.read_metadata() is reader.read_metadata()
    store.put(f"{manifest.folder}/index.json", b"{}")
    for files in (manifest.files, manifest.files[:1]):
        other = Manifest(4, 1, {}, "ddp", {}, files=files)
        with pytest.raises(DamagedCheckpoint, match="^index.json does not match its checksum$"):
            ShardReader(store, other).read_metadata()


def test_pieces_are_read_in_the_order_they_lie_in(tmp_path: Path) -> None:
    reader = ShardReader(*written(tmp_path, tensors()))
    places = [reader._order(MetadataIndex(name, (0,))) for name in tensors()]
    assert places == [(DATA, 0), (DATA, 16), (DATA, 32), (DATA, 36)]
    assert not ShardReader.validate_checkpoint_id("x")
    assert not ShardWriter.validate_checkpoint_id("x")


def metadata(tensor: torch.Tensor) -> Metadata:
    chunk = ChunkStorageMetadata(torch.Size([0]), tensor.shape)
    properties = TensorProperties(dtype=tensor.dtype)
    return Metadata({"a": TensorStorageMetadata(properties, tensor.shape, [chunk])})


class Planner:
    """Hands out tensors by name."""

    def __init__(self, given: Mapping[str, torch.Tensor]) -> None:
        self.given = given

    def resolve_data(self, item: Any) -> torch.Tensor:
        return self.given[item.index.fqn]


def plan(*names: str) -> Any:
    return SimpleNamespace(
        items=[SimpleNamespace(index=MetadataIndex(name, (0,))) for name in names]
    )


class Committed:
    def __init__(self, error: Exception | None = None) -> None:
        self.files: list[File] = []
        self.error = error

    def __call__(self, files: list[File]) -> None:
        if self.error is not None:
            raise self.error
        self.files = files


def finish(writer: ShardWriter, *, is_empty: bool = False) -> None:
    given: Any = Planner({"a": torch.arange(3.0)})
    done = writer.write_data(plan() if is_empty else plan("a"), given).wait()
    described = Metadata({}) if is_empty else metadata(torch.arange(3.0))
    writer.finish(described, [done])


def test_a_rank_writes_its_pieces_and_commits_them_with_the_index(tmp_path: Path) -> None:
    store, commit, waited = LocalStorage(tmp_path), Committed(), []
    writer = ShardWriter(store, "step", 3, commit, lambda: waited.append(1))
    finish(writer)
    data = struct.pack("<3f", 0, 1, 2)
    assert waited == [1]
    assert store.read("step/data-00003.bin") == data
    text = store.read("step/index.json")
    piece = [[0], [3], "data-00003.bin", 0, 12, checksum(data)]
    assert json.loads(text) == {"a": {"dtype": "float32", "size": [3], "chunks": [piece]}}
    assert commit.files == [
        File("data-00003.bin", 12, checksum(data)),
        File("index.json", len(text), checksum(text)),
    ]


def test_pieces_lie_one_behind_the_other(tmp_path: Path) -> None:
    writer = ShardWriter(LocalStorage(tmp_path), "step", 0, Committed())
    given: Any = Planner({"a": torch.arange(3.0), "b": torch.ones(2)})
    found = writer.write_data(plan("a", "b"), given).wait()
    pieces = [each.storage_data for each in found]
    assert [(each.start, each.length) for each in pieces] == [(0, 12), (12, 8)]
    assert [each.size_in_bytes for each in found] == [12, 8]
    whole = (tmp_path / "step/data-00000.bin").read_bytes()
    assert writer._file == File("data-00000.bin", 20, checksum(whole))


def test_a_rank_without_pieces_has_no_file(tmp_path: Path) -> None:
    store, commit = LocalStorage(tmp_path), Committed()
    finish(ShardWriter(store, "step", 0, commit), is_empty=True)
    assert store.names("step") == ["index.json"]
    assert [file.name for file in commit.files] == ["index.json"]


def test_a_rank_that_cannot_write_says_why_and_nothing_is_committed(tmp_path: Path) -> None:
    def fails() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    commit = Committed()
    with pytest.raises(RanksFailed, match=r"^OSError: \[Errno 28\] No space left on device$"):
        finish(ShardWriter(LocalStorage(tmp_path), "step", 0, commit, fails))
    assert commit.files == []


def test_a_commit_that_fails_is_a_failure_of_all_and_a_stale_one_says_so(tmp_path: Path) -> None:
    store = LocalStorage(tmp_path)
    with pytest.raises(RanksFailed, match="^ValueError: no$"):
        finish(ShardWriter(store, "step", 0, Committed(ValueError("no"))))
    with pytest.raises(lineage.StaleAttempt, match="^attempt 1 is over$"):
        finish(ShardWriter(store, "step", 0, Committed(lineage.StaleAttempt("attempt 1 is over"))))


def test_only_tensors_are_stored_as_pieces() -> None:
    item: Any = SimpleNamespace(index=MetadataIndex("a"), tensor_data=None)
    with pytest.raises(TypeError, match="^a: only tensors are stored as pieces$"):
        shards._held(item)
    chunk = ChunkStorageMetadata(torch.Size([2, 0]), torch.Size([2, 3]))
    data = SimpleNamespace(chunk=chunk, properties=TensorProperties(dtype=torch.float64))
    item = SimpleNamespace(index=MetadataIndex("a", (2, 0)), tensor_data=data)
    assert shards._held(item) == Held("a", (2, 0), 48)
    item = SimpleNamespace(index=MetadataIndex("a"), tensor_data=data)
    assert shards._held(item).offsets == ()


# The index


def test_lines_of_ranks_are_put_together_while_they_are_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = [
        json.dumps({"a": {"dtype": "uint8", "size": [2], "chunks": [n]}}).encode() for n in (1, 2)
    ]
    file = io.BytesIO()
    size, crc32 = tensor_index.write_lines(lines, file)
    text = file.getvalue()
    assert json.loads(text) == {"a": {"dtype": "uint8", "size": [2], "chunks": [1, 2]}}
    assert (size, crc32) == (len(text), checksum(text))
    monkeypatch.setattr(tensor_index, "MOST_MERGED", 2 * len(lines[0]) - 1)
    many = io.BytesIO()
    size, crc32 = tensor_index.write_lines(iter([*lines, lines[0]]), many)
    assert many.getvalue() == b"\n".join([*lines, lines[0]])
    assert (size, crc32) == (len(many.getvalue()), checksum(many.getvalue()))


def test_an_index_comes_back_as_torchs_metadata() -> None:
    tensor = torch.arange(3.0)
    index = MetadataIndex("a", (0,))
    text = tensor_index.to_json(metadata(tensor), {index: Piece("f", 5, 12, "00000000")})
    back = tensor_index.from_json(text, {"f": 17})
    assert back.storage_data == {index: Piece("f", 5, 12, "00000000")}
    entry = tensor_index.described(back, "a")
    assert (entry.size, entry.properties.dtype) == (torch.Size([3]), torch.float32)
    assert entry.chunks == [ChunkStorageMetadata(torch.Size([0]), torch.Size([3]))]
    plain_bytes = Metadata({"a": BytesStorageMetadata()})
    with pytest.raises(TypeError, match="^a: only tensors are stored as pieces$"):
        tensor_index.to_json(plain_bytes, {})
    with pytest.raises(DamagedCheckpoint, match="^a is not stored as a tensor$"):
        tensor_index.described(plain_bytes, "a")
    strange = text.replace(b"float32", b"strange32")
    with pytest.raises(
        DamagedCheckpoint, match=r"^index.json cannot be read \(strange32 is no number format\)$"
    ):
        tensor_index.from_json(strange, {"f": 17})


# Who writes what


def test_a_piece_has_the_same_home_on_every_rank_and_its_holders_know_their_places() -> None:
    held = [Held("a", (0,), 4), Held("a", (1,), 4), Held("b", (0,), 4)]
    keys = keys_of(held)
    assert keys.shape == (3, 2)
    assert len({tuple(row) for row in keys.tolist()}) == 3
    assert keys_of(held[::-1]).tolist() == keys[::-1].tolist()
    homes = homes_of(keys, 5)
    assert all(0 <= home < 5 for home in homes.tolist())
    assert homes_of(keys, 1).tolist() == [0, 0, 0]
    asked = np.concatenate([keys, keys[:1], keys[:1]])
    said = answers(asked, np.array([3, 3, 3, 1, 7]))
    assert said[:, 0].tolist() == [1, 0, 0, 0, 2], "by rank"
    assert said[:, 1].tolist() == [3, 1, 1, 3, 3]
    assert len({said[0, 2], said[3, 2], said[4, 2]}) == 1
    assert said[1, 2] == said[2, 2] != said[0, 2]
    assert answers(keys[:0], np.zeros(0, np.int64)).shape == (0, 3)


def test_holders_of_a_set_take_as_many_bytes_each() -> None:
    held = [Held("large", (0,), 9), Held("b", (0,), 5), Held("c", (0,), 4), Held("mine", (0,), 1)]
    keys = keys_of(held)
    parts = [
        own_share(held, keys, np.array([[place, 2, 8]] * 3 + [[0, 1, 9]])) for place in range(2)
    ]
    assert parts[0] == [True, False, False, True]
    assert parts[1] == [False, True, True, True]


# State


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


def test_a_state_is_named_by_the_models_own_names() -> None:
    model, optimizer = trained()
    average = torch.ones(2)
    state = TrainingState(model, optimizer, rank=3, averages={"ema.linear.bias": average})
    found, values = state.everything()
    assert set(found) == {
        *(f"model.{name}" for name in model.state_dict()),
        *(
            f"optimizer.linear.{name}.{key}"
            for name in ("weight", "bias")
            for key in ("step", "exp_avg", "exp_avg_sq")
        ),
        "ema.linear.bias",
        "rank.00003",
    }
    assert values["common"] == {}
    assert values["optimizer"]["groups"] == saved_groups(optimizer)
    assert set(unpack(found["rank.00003"])) == {"random"}
    assert set(state.load_targets()) == set(found) - {"rank.00003"}
    changes = state.changes_in_forward()
    assert {name for name in found if changes(name)} == {
        "model.frozen",
        "model.norm.running_mean",
        "model.norm.running_var",
        "model.norm.num_batches_tracked",
        "rank.00003",
    }


def test_of_copies_of_a_model_only_the_firsts_statistics_are_saved() -> None:
    model, _ = trained()
    names = set(TrainingState(model, None).weights())
    later = set(TrainingState(model, None, is_first_copy=False).weights())
    assert names - later == {
        f"model.norm.{n}" for n in ("running_mean", "running_var", "num_batches_tracked")
    }


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


def test_what_is_common_and_what_is_a_ranks_own_comes_back() -> None:
    model, optimizer = trained()
    saved = TrainingState(
        model, optimizer, common={"run": Thing(5)}, own={"mine": Thing(6), "more": Thing(7)}
    )
    found, values = saved.everything()
    assert values["common"] == {"run": {"value": 5}}
    own = unpack(found[own_name(0)])
    assert own["mine"] == {"value": 6}
    common, mine, other = Thing(), Thing(), Thing(1)
    new = TrainingState(
        *trained(), common={"run": common, "new": other}, own={"mine": mine, "new": other}
    )
    random.seed(own["mine"]["value"])
    new.restore(values, {name: own[name] for name in ("mine", "random")})
    assert (common.value, mine.value, other.value) == (5, 6, 1)


def test_a_users_object_that_fails_is_blamed_by_its_name() -> None:
    broken = Thing(error=ValueError("no"))
    state = TrainingState(Small(), None, own={"mine": broken})
    with pytest.raises(ValueError, match="^no") as caught:
        state.everything()
    assert "raised by state_dict of mine (stateful)" in "".join(caught.value.__notes__)
    broken.error = ValueError("no")
    with pytest.raises(ValueError, match="^no") as caught:
        state.restore({"common": {}}, {"mine": {}})
    assert "raised by load_state_dict of mine (stateful)" in "".join(caught.value.__notes__)


def test_optimizer_values_go_back_to_the_parameter_they_are_of() -> None:
    model, optimizer = trained()
    state = TrainingState(model, optimizer)
    values = {
        "optimizer": {"values": {"optimizer.linear.weight.beta": 7}, "groups": None},
        "common": {},
    }
    state.restore(values, {})
    assert optimizer.state[model.linear.weight]["beta"] == 7
    assert optimizer.param_groups[0]["lr"] == 0.1, "without groups, settings are those of now"
    assert state._optimizer_state()[1] == {"optimizer.linear.weight.beta": 7}
    optimizer.state[model.linear.weight]["beta"] = None
    assert state._optimizer_state()[1] == {}
    before = model.linear.weight.clone()
    state.restore({"common": {}}, {})
    assert torch.equal(before, model.linear.weight)


def test_settings_of_groups_come_back_in_the_form_they_have() -> None:
    _, optimizer = trained()
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
    saved = saved_groups(optimizer)
    assert saved[0]["betas"] == [0.8, 0.9]
    assert "params" not in saved[0]
    rate = optimizer.param_groups[0]["lr"]
    _restore_groups(optimizer, [{"lr": 0.5, "betas": [0.1, 0.2], "new": [1]}])
    group = optimizer.param_groups[0]
    assert group["lr"] is rate
    assert float(rate) == 0.5
    assert (group["betas"], group["new"]) == ((0.1, 0.2), [1])
    with pytest.raises(ConfigError) as caught:
        _restore_groups(optimizer, [])
    assert str(caught.value) == (
        "optimizer = AdamW: has 1 parameter groups, the checkpoint has 0; make the same optimizer "
        "that was saved"
    )


def test_what_json_can_hold_is_plain() -> None:
    given = {"a": (1, 2.5, None, True, "x"), 3: [torch.tensor(4)], "t": torch.tensor([2.0])}
    assert plain(given, "here") == {"a": [1, 2.5, None, True, "x"], "3": [4], "t": 2.0}
    for wrong in (torch.ones(2), {1}):
        with pytest.raises(ConfigError) as caught:
            plain(wrong, "here")
        assert str(caught.value) == (
            f"here = {type(wrong).__name__}: cannot be saved without pickle; keep numbers, text, "
            "lists, dicts and tensors in an optimizer's state"
        )


def test_a_ranks_own_tensor_is_known_by_its_name() -> None:
    assert own_name(7) == "rank.00007"
    assert is_own("rank.00007")
    assert is_own("rank.123456")
    assert not is_own("model.rank.00007")
    assert not is_own("rank.00007.more")


def test_all_that_needs_a_pickle_is_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        pack({"a": {1: Path()}, "fine": 1, "b": Path()})
    assert [problem.where for problem in caught.value.problems] == [
        "state_dict of a",
        "state_dict of b",
    ]
    assert pack({}).dtype == torch.uint8


class Accelerator:
    """A device with a random stream of its own."""

    device = torch.device("meta")

    def __init__(self) -> None:
        self.state = torch.tensor([1])

    def random_state(self) -> torch.Tensor:
        return self.state

    def set_random_state(self, state: torch.Tensor) -> None:
        self.state = state


def test_the_random_stream_of_a_device_is_kept_by_its_type() -> None:
    device: Any = Accelerator()
    state = _random_state(device)
    assert state["meta"].tolist() == [1]
    device.state = torch.tensor([2])
    _restore_random(state, device)
    assert device.state.tolist() == [1]
    cpu = accelerator_of(torch.device("cpu"))
    on_cpu = _random_state(cpu)
    assert set(on_cpu) == {"torch", "python", "numpy"}
    device.state = torch.tensor([3])
    _restore_random(on_cpu, device)
    assert device.state.tolist() == [3], "one that has none leaves it as it is"
    drawn = random.random()  # noqa: S311 - no secret
    _restore_random(unpack(pack(on_cpu)), cpu)
    assert random.random() == drawn  # noqa: S311


def test_a_value_made_of_two_functions() -> None:
    held = {"x": 1}
    value = Value(lambda: held["x"], lambda new: held.update(x=new))
    assert value.state_dict() == {"value": 1}
    value.load_state_dict({"value": 5})
    assert held == {"x": 5}


class Keeper:
    """An engine that keeps its state."""

    def __init__(self) -> None:
        self.made: list[bool] = []
        self.back: Any = None

    def model_state(self) -> dict[str, torch.Tensor]:
        return {"w": torch.zeros(2)}

    def optimizer_state(self, *, make: bool = False) -> dict[str, Any]:
        self.made.append(make)
        return {"w.exp": torch.zeros(2), "w.step": torch.tensor(0), "scale": (1, 2)}

    def put_back(self, *given: Any) -> None:
        self.back = given


def test_an_engines_state_is_made_to_be_loaded_and_not_to_be_saved() -> None:
    keeper: Any = Keeper()
    state = GatheredState(Small(), None, keeper=keeper)
    found, values = state.everything()
    assert keeper.made == [False]
    assert values["optimizer"] == {"values": {"optimizer.scale": [1, 2]}, "groups": []}
    assert {"model.w", "optimizer.w.exp", "optimizer.w.step"} < set(found)
    targets = state.load_targets()
    assert keeper.made == [False, True]
    state.forget(["optimizer.w.exp"])
    assert "optimizer.w.exp" in targets, "what was handed out stays"
    state.restore({"common": {}}, {})
    model, optimizer = keeper.back
    assert (set(model), set(optimizer)) == ({"w"}, {"w.step"})
    state.load_targets()
    saved = {"groups": [], "values": {"optimizer.scale": [3, 4]}}
    state.restore({"common": {}, "optimizer": saved}, {})
    assert keeper.back[1]["scale"] == [3, 4]
    assert saved["values"] == {"optimizer.scale": [3, 4]}
    assert state._targets == {}


# Storage


def test_a_store_whose_library_is_missing_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import fsspec

    def missing(address: str) -> Any:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    for address, remedy in (
        ("s3://bucket", "pip install 'drivetrain[s3]'"),
        ("s3a://bucket", "pip install 'drivetrain[s3]'"),
        ("gs://bucket", "install what is named"),
    ):
        with pytest.raises(EnvironmentProblem) as caught:
            storage_at(address)
        assert str(caught.value) == f"address = {address}: Install s3fs to access S3; {remedy}"


def test_an_address_nobody_knows_says_what_to_give() -> None:
    with pytest.raises(ConfigError) as caught:
        storage_at("nowhere://x")
    assert str(caught.value).endswith("; give a path, or an address fsspec knows (s3://…, gs://…)")


class Listing:
    """A store's answers."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def invalidate_cache(self) -> None:
        self.asked.append("anew")

    def ls(self, path: str, detail: bool) -> list[str]:
        self.asked.append((path, detail))
        if path.endswith("none"):
            raise FileNotFoundError(path)
        return ["bucket/run/b/", "bucket/run/a.json", "bucket/run/", "bucket/run"]

    def info(self, path: str) -> dict[str, Any]:
        return {"size": "12"}

    def cat_file(self, path: str, start: int, end: int | None) -> bytearray:
        self.asked.append((path, start, end))
        return bytearray(b"data")

    def rm(self, path: str, recursive: bool) -> None:
        self.asked.append((path, recursive))
        if path.endswith("none"):
            raise FileNotFoundError(path)


def remote(monkeypatch: pytest.MonkeyPatch) -> tuple[RemoteStorage, Listing]:
    store = Listing()
    monkeypatch.setattr(storage, "_open_store", lambda _: (store, "bucket/run/"))
    return RemoteStorage("s3://bucket/run/"), store


def test_a_folder_of_a_store_is_listed_anew_and_without_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place, store = remote(monkeypatch)
    assert place.address == "s3://bucket/run"
    assert place.names() == ["a.json", "b"]
    assert store.asked == ["anew", ("bucket/run", False)]
    assert place.names("none") == []
    assert store.asked[-1] == ("bucket/run/none", False)
    assert place.size("a.json") == 12


def test_a_store_is_asked_for_just_the_bytes_that_are_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place, store = remote(monkeypatch)
    assert place.read("a", 3, 4) == b"data"
    assert store.asked == [("bucket/run/a", 3, 7)], "one request for a part"
    assert place.read("a", 5, 0) == b""
    assert len(store.asked) == 1
    assert isinstance(place.read("a"), bytes)
    assert store.asked[-1] == ("bucket/run/a", 0, None)
    place.remove("a")
    place.remove("none")
    assert store.asked[-2:] == [("bucket/run/a", True), ("bucket/run/none", True)]


class Upload(io.BytesIO):
    """A stream to a store."""

    is_discarded = False

    def discard(self) -> None:
        self.is_discarded = True


def test_a_stream_to_a_store_that_breaks_leaves_no_object(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place, store = remote(monkeypatch)
    opened: list[tuple[str, str]] = []
    broken, whole = Upload(), Upload()
    uploads = [broken, whole]

    def start(path: str, mode: str) -> Upload:
        opened.append((path, mode))
        return uploads.pop(0)

    monkeypatch.setattr(store, "open", start, raising=False)
    with pytest.raises(ValueError, match="half"), place.writing("a") as stream:
        stream.write(b"1")
        raise ValueError("half")
    assert broken.is_discarded
    assert not broken.closed
    with place.writing("b") as stream:
        stream.write(b"12")
    assert whole.closed
    assert not whole.is_discarded
    assert opened == [("bucket/run/a", "wb"), ("bucket/run/b", "wb")]


# Checkpointer


def world() -> World:
    identity = Identity("test", 0, 0, 1, 1, 0, "127.0.0.1", 0)
    return World(identity, Layout(), torch.device("cpu"), None)


@pytest.fixture
def saver(tmp_path: Path) -> Iterator[Checkpointer]:
    made = Checkpointer(LocalStorage(tmp_path), Checkpoint(keep_last=9), world(), "ddp")
    made.claim(0)
    yield made
    made.close()


def run_state(value: int = 0) -> TrainingState:
    return TrainingState(*trained(), common={"run": Thing(value)}, own={"mine": Thing(value)})


def saved(saver: Checkpointer, step: int, state: TrainingState | None = None, **more: Any) -> Saved:
    saver.save(state or run_state(step), step, {"step": step}, **more)
    done = saver.wait()
    assert done is not None
    return done


def test_a_save_is_over_when_it_is_waited_for_and_says_what_it_took(saver: Checkpointer) -> None:
    assert saver.wait() is None
    assert saver.poll() is None
    assert saver.save(run_state(), 4, {"step": 4}) is None
    before = saver.save(run_state(), 6, {"step": 6})
    assert before is not None
    assert (before.step, before.problem) == (4, "")
    assert before.blocked_s > 0
    assert before.beside_s > 0
    assert saver.copied_bytes > 0
    last = saver.close()
    assert last is not None
    assert last.step == 6
    assert saver._stager.num_bytes == 0
    assert [each.step for each in saver.good()] == [6, 4]


def test_a_save_that_is_not_asynchronous_is_over_at_once(tmp_path: Path) -> None:
    rule = Checkpoint(asynchronous=False, save="full")
    saver = Checkpointer(LocalStorage(tmp_path), rule, world(), "ddp")
    saver.claim(0)
    done = saver.save(run_state(), 4, {"step": 4})
    assert done is not None
    assert done.step == 4
    assert "rank.00000" in WholeTensors(saver.storage, saver.good()[0]).names()


def test_a_manifest_says_how_it_came_about(saver: Checkpointer) -> None:
    saver._contract = Contract({"seed": 3})
    saved(saver, 4)
    (manifest,) = saver.good()
    assert (manifest.step, manifest.attempt, manifest.strategy) == (4, 1, "ddp")
    assert manifest.contents == "everything"
    assert manifest.contract == {"seed": 3}
    assert manifest.versions == versions()
    assert manifest.position == {"step": 4}
    assert manifest.layout["dp_shard"] == 1
    assert manifest.values["common"] == {"run": {"value": 4}}
    assert manifest.created_s > 1.7e9
    assert versions()["drivetrain"] == __version__
    assert set(versions()) == {"drivetrain", "torch", "python"}


def test_everything_comes_back(saver: Checkpointer) -> None:
    state = run_state(5)
    saved(saver, 4, state)
    other = run_state()
    manifest = saver.load_newest(other)
    assert manifest is not None
    assert manifest.step == 4
    assert saver.changes == []
    assert saver.from_first_rank == ()
    for name, tensor in state.load_targets().items():
        assert torch.equal(tensor, other.load_targets()[name]), name
    common: Any = other.common["run"]
    mine: Any = other.own["mine"]
    assert (common.value, mine.value) == (5, 5)


def test_weights_alone_are_saved_and_cannot_be_resumed_from(saver: Checkpointer) -> None:
    saved(saver, 4, contents="weights")
    (manifest,) = saver.good()
    assert manifest.contents == "weights"
    assert all(name.startswith("model.") for name in WholeTensors(saver.storage, manifest).names())
    words = "^it holds weights only; nothing can resume from it exactly$"
    with pytest.raises(DamagedCheckpoint, match=words):
        saver.load(run_state(), manifest.folder)


def test_a_damaged_checkpoint_is_passed_over_with_a_word(saver: Checkpointer) -> None:
    for step in (4, 6, 8):
        saved(saver, step)
    for step, name in ((6, DATA), (8, "index.json")):
        place = f"{folder_name(step, 1)}/{name}"
        size = saver.storage.size(place)
        assert size is not None
        saver.storage.put(place, b"x" * size)
    with pytest.warns(UserWarning, match="was passed over") as said:
        manifest = saver.load_newest(run_state())
    assert manifest is not None
    assert manifest.step == 4
    assert [str(each.message).partition(" was passed over: ")[0] for each in said][:2] == [
        f"checkpoint {folder_name(8, 1)}",
        f"checkpoint {folder_name(6, 1)}",
    ]
    saver.storage.remove(folder_name(4, 1))
    with warnings.catch_warnings(), pytest.raises(EnvironmentProblem) as caught:
        warnings.simplefilter("ignore")
        saver.load_newest(run_state())
    assert str(caught.value).startswith("checkpoints = ")
    assert f"{folder_name(6, 1)} is damaged, and no checkpoint before it is good" in str(
        caught.value
    )


def test_without_any_checkpoint_nothing_is_loaded(saver: Checkpointer) -> None:
    assert saver.load_newest(run_state()) is None
    (Path(saver.storage.address) / folder_name(2, 1)).mkdir()
    with pytest.warns(UserWarning, match="was passed over: no manifest.json"):
        assert saver.load_newest(run_state()) is None


def test_a_claim_that_cannot_be_read_stops_a_load(saver: Checkpointer) -> None:
    saver.check_claims()
    saver.storage.put("attempt-00001.json", b"{}")
    with pytest.raises(EnvironmentProblem, match="the claim of attempt 1 cannot be read"):
        saver.load_newest(run_state())


def test_another_optimizer_begins_anew_and_other_settings_stay_those_of_now(
    saver: Checkpointer,
) -> None:
    saver._contract = Contract({"optimizer.class": "AdamW", "optimization.learning_rate": 0.1})
    saved(saver, 4)
    key = "optimization.learning_rate"
    saver._contract = Contract({"optimizer.class": "AdamW", key: 0.2}, frozenset({key}))
    state = run_state()
    assert state.optimizer is not None
    state.optimizer.param_groups[0]["lr"] = 0.2
    saver.load(state, folder_name(4, 1))
    assert [change.key for change in saver.changes] == [key]
    assert state.optimizer.param_groups[0]["lr"] == 0.2
    key = "optimizer.class"
    saver._contract = Contract({key: "SGD"}, frozenset({key}))
    model = Small()
    sgd = torch.optim.SGD(model.linear.parameters(), lr=0.3, momentum=0.9)
    saver.load(TrainingState(model, sgd), folder_name(4, 1))
    assert sgd.param_groups[0]["lr"] == 0.3
    assert not sgd.state.get(model.linear.weight)


def test_ranks_in_another_layout_get_rank_0s_of_what_is_the_users(saver: Checkpointer) -> None:
    saved(saver, 4)
    folder = folder_name(4, 1)
    place = f"{folder}/{NAME}"
    manifest = read_manifest(saver.storage, folder)
    other = replace(manifest, layout={**manifest.layout, "dp_shard": 2})
    saver.storage.put(place, other.to_json())
    state = TrainingState(
        *trained(),
        own={"mine": Thing(), "theirs": Thing(1)},
        users=frozenset({"mine", "theirs"}),
        common={"run": Thing()},
    )
    before = torch.get_rng_state()
    saver.load(state, folder)
    mine: Any = state.own["mine"]
    assert mine.value == 4
    assert saver.from_first_rank == ("mine",)
    assert torch.equal(torch.get_rng_state(), before), "a random stream is no user's"


def test_a_checkpoint_of_this_attempt_can_be_amended(saver: Checkpointer) -> None:
    saved(saver, 4)
    saver.amend(4, lambda values: {**values, "score": (1, 2)})
    manifest = read_manifest(saver.storage, folder_name(4, 1))
    assert manifest.values["score"] == [1, 2]
    assert manifest.values["common"] == {"run": {"value": 4}}
    lineage.claim_next(saver.storage, 4)
    with pytest.raises(lineage.StaleAttempt):
        saver.amend(4, lambda values: values)


def test_a_save_of_an_attempt_that_was_replaced_is_refused(saver: Checkpointer) -> None:
    lineage.claim_next(saver.storage, 0)
    saver.save(run_state(), 4, {"step": 4})
    with pytest.raises(lineage.StaleAttempt, match="attempt 2 has taken over"):
        saver.wait()


def test_a_save_that_fails_leaves_nothing_and_says_why(
    saver: Checkpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(name: str, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(saver.storage, "put", full)
        assert saved(saver, 4).problem == "OSError: [Errno 28] No space left on device"
    assert saver.storage.names() == ["attempt-00001.json"]
    assert saved(saver, 6).problem == ""


def test_a_checkpoint_that_could_not_be_deleted_undoes_no_save(
    saver: Checkpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(saver, "_drop_outdated", fails)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert saved(saver, 4).problem == ""
    words = "an outdated checkpoint was not deleted: [Errno 5] Input/output error"
    assert words in [str(each.message) for each in said]
    assert [each.step for each in saver.good()] == [4]


def test_what_is_pinned_stays_and_what_is_unfinished_goes(tmp_path: Path) -> None:
    place = LocalStorage(tmp_path)
    saver = Checkpointer(place, Checkpoint(keep_last=1), world(), "ddp")
    saver.claim(0)
    saved(saver, 2)
    pin(place, folder_name(2, 1), "another")
    for step in (4, 6):
        saved(saver, step)
    assert [each.step for each in saver.good()] == [6, 2]
    for attempt in (1, 2):
        (tmp_path / folder_name(8, attempt)).mkdir()
    saver.clean()
    assert (tmp_path / folder_name(8, 1)).exists(), "it may be this attempt's own"
    saver.attempt = 2
    saver.clean()
    assert not (tmp_path / folder_name(8, 1)).exists()
    assert (tmp_path / folder_name(8, 2)).exists()
    assert [each.step for each in saver.good()] == [6, 2]


def test_whether_a_checkpoint_is_still_there_and_anothers_can_be_loaded(
    saver: Checkpointer, tmp_path: Path
) -> None:
    saved(saver, 4)
    assert saver.still_there(folder_name(4, 1)) is True
    assert saver.still_there(folder_name(6, 1)) is False
    other = saver.elsewhere(LocalStorage(tmp_path / "other"))
    assert other.storage.address == str(tmp_path / "other")
    assert saver.storage.address == str(tmp_path)
    assert other.good() == []
    assert other.attempt == saver.attempt


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_tried_three_times_and_then_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    saver = Checkpointer(LocalStorage(tmp_path), Checkpoint(), world(), "ddp")
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)

    def full(*_: Any) -> Any:
        raise OSError(code, "No room")

    with monkeypatch.context() as patch:
        patch.setattr(lineage, "claim_next", full)
        with pytest.raises(NotSaved) as caught:
            saver.claim(0)
    assert slept == [2.0, 2.0, 0.0]
    assert str(caught.value) == (
        f"nothing can be written to {tmp_path} (OSError: [Errno {code}] No room), so no step of "
        "this attempt could be saved; make room, or see that it can be written, and start the "
        "same command again"
    )
    assert saver.claim(6, at_least=5) == 5
    assert lineage.read_claims(saver.storage) == [lineage.Claim(5, 6)]


def test_other_trouble_of_a_claim_is_for_another_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = Checkpointer(LocalStorage(tmp_path), Checkpoint(), world(), "ddp")

    def broken(*_: Any) -> Any:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(lineage, "claim_next", broken)
    with pytest.raises(OSError, match="Input/output error"):
        saver.claim(0)


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (DamagedCheckpoint("a is damaged"), "a is damaged"),
        (pickle.UnpicklingError("no\nmore"), "no"),
        (KeyError(), "KeyError"),
        (FileNotFoundError("gone"), "gone"),
    ],
)
def test_damage_that_one_rank_meets_is_damage(
    saver: Checkpointer, error: Exception, problem: str
) -> None:
    def read() -> Any:
        raise error

    with pytest.raises(DamagedCheckpoint) as caught:
        saver._together(read)
    assert str(caught.value) == problem
    assert saver._together(lambda: 5) == 5


def test_damage_that_another_rank_meets_is_damage_here(saver: Checkpointer) -> None:
    told: list[list[float]] = []

    class Others:
        def sum_floats(self, values: list[float]) -> list[float]:
            told.append(values)
            return [values[0] + 1.0]

    others: Any = Others()
    saver._world = others
    with pytest.raises(DamagedCheckpoint, match="^damaged, as another rank found$"):
        saver._together(lambda: 5)
    assert told == [[0.0]]
    saver._world = world()


def test_fingerprints_that_are_none_are_damage(saver: Checkpointer) -> None:
    saved(saver, 4)
    saver.amend(4, lambda values: {**values, "frozen": [1]})
    words = "^its fingerprints of what is frozen are none$"
    with pytest.raises(DamagedCheckpoint, match=words):
        saver.load(run_state(), folder_name(4, 1))


def test_one_process_is_nothing_to_warn_of_and_said_so_once() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            checkpointer_module._expect_one_process()
        message = "torch.distributed is disabled, unavailable or uninitialized, assuming …"
        warnings.warn(message, stacklevel=1)
        filters = [each for each in warnings.filters if each[1] and each[1].match(message)]
        assert len(filters) == 1
        with pytest.raises(UserWarning, match="something else"):
            warnings.warn("something else", stacklevel=1)


def test_only_what_is_trained_is_saved_and_the_base_must_be_the_same(saver: Checkpointer) -> None:
    model, optimizer = trained()

    def state(model: Small, optimizer: torch.optim.Optimizer) -> TrainingState:
        base = FrozenBase({"model.frozen": model.frozen}, lambda values: values)
        return TrainingState(model, optimizer, base=base, common={"run": Thing()})

    saved(saver, 4, state(model, optimizer), contents="trained")
    (manifest,) = saver.good()
    assert "model.frozen" not in WholeTensors(saver.storage, manifest).names()
    assert "model.linear.weight" in WholeTensors(saver.storage, manifest).names()
    assert list(manifest.values["frozen"]) == ["model.frozen"]
    other = state(*trained())
    saver.load(other, manifest.folder)
    assert torch.equal(other.load_targets()["model.linear.weight"], model.linear.weight)
    changed, optimizer = trained()
    changed.frozen.data.fill_(2)
    with pytest.raises(ConfigError, match=f"^frozen: is frozen and not what {manifest.folder} was"):
        saver.load(state(changed, optimizer), manifest.folder)


def test_a_model_that_is_another_is_refused_before_anything_is_read(saver: Checkpointer) -> None:
    saved(saver, 4)
    model = nn.Linear(2, 2)
    before = model.weight.clone()
    with pytest.raises(ConfigError, match=f"^model: checkpoint {folder_name(4, 1)} has no bias, w"):
        saver.load(TrainingState(model, None), folder_name(4, 1))
    wide = Small()
    wide.linear = nn.Linear(2, 3)
    with pytest.raises(ConfigError, match=r"^linear\.weight = \(3, 2\): checkpoint .* as \(2, 2\)"):
        saver.load(TrainingState(wide, None), folder_name(4, 1))
    assert torch.equal(model.weight, before)


def test_a_save_that_is_over_is_found_without_waiting(saver: Checkpointer) -> None:
    saver.save(run_state(), 4, {"step": 4})
    assert saver._pending is not None
    saver._pending.future.result()
    found = saver.poll()
    assert found is not None
    assert found.step == 4
    assert saver.poll() is None

    class Running:
        def done(self) -> bool:
            return False

    running: Any = Running()
    saver._pending = checkpointer_module._Pending(6, "step", running, 0.0, 0.0)
    assert saver.poll() is None
    assert saver._pending is not None
    saver._pending = None


def test_a_save_that_was_committed_counts_though_it_ended_in_an_error(saver: Checkpointer) -> None:
    saved(saver, 4)

    class Failed:
        def __init__(self, error: BaseException) -> None:
            self.error = error

        def result(self) -> None:
            raise self.error

    def ended(folder: str, error: BaseException) -> Saved | None:
        failed: Any = Failed(error)
        saver._pending = checkpointer_module._Pending(4, folder, failed, 1.0, 0.25)
        return saver.wait()

    done = ended(folder_name(4, 1), RuntimeError("a rank has died"))
    assert done is not None
    assert (done.problem, done.blocked_s) == ("", 0.25)
    (Path(saver.storage.address) / folder_name(6, 1)).mkdir()
    lost = ended(folder_name(6, 1), RuntimeError("a rank has died"))
    assert lost is not None
    assert lost.problem == "RuntimeError: a rank has died"
    assert folder_name(6, 1) not in saver.storage.names()
    for error in (KeyboardInterrupt(), SystemExit(3)):
        with pytest.raises(type(error)):
            ended(folder_name(6, 1), error)


def test_whoever_changes_weights_asks_the_copy_first(saver: Checkpointer) -> None:
    asked: list[str] = []

    class Stager:
        is_copying = True

        def before_change(self) -> None:
            asked.append("before")

        def close(self) -> None:
            asked.append("close")

    stager: Any = Stager()
    saver._stager = stager
    assert saver.is_copying is True
    saver.before_change()
    saver.close()
    assert asked == ["before", "close"]


def test_one_process_writes_all_that_it_holds() -> None:
    sharing = Sharing(None)
    assert sharing.of([Held("a", (0,), 1)] * 3) == [True] * 3
    assert sharing.num_settled == 0


def test_a_local_storage_is_absolute_and_lists_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for place in (
        LocalStorage(Path("runs")),
        storage_at("runs"),
        storage_at(f"file://{tmp_path}/runs"),
    ):
        assert place.address == f"{tmp_path}/runs"
    for name in ("b", "a", "c"):
        storage_at("runs").put(name, b"")
    assert storage_at("runs").names() == ["a", "b", "c"]
    assert storage_at("runs").size("a") == 0


def test_what_ranks_had_alone_is_compared_value_by_value(tmp_path: Path) -> None:
    here, there = (
        written(tmp_path / name, {"rank.00000": pack({"mine": {"value": value}})})
        for name, value in (("here", 1), ("there", 2))
    )
    (found,) = compare(here, there).differences
    assert (found.name, found.here, found.there) == ("rank.00000.mine.value", "1", "2")
    assert compare(here, here).num_identical == 1


def test_in_another_layout_nothing_of_a_ranks_own_is_taken_unless_it_is_the_users(
    saver: Checkpointer,
) -> None:
    saved(saver, 4)
    manifest = saver.good()[0]
    other = replace(manifest, layout={**manifest.layout, "dp_shard": 2})
    saver.storage.put(f"{manifest.folder}/{NAME}", other.to_json())
    state = run_state()
    saver.load(state, manifest.folder)
    mine: Any = state.own["mine"]
    assert mine.value == 0
    assert saver.from_first_rank == ()


@pytest.mark.parametrize("leads", [True, False])
def test_a_rank_keeps_its_own_state_also_where_another_keeps_the_weights(
    saver: Checkpointer, leads: bool
) -> None:
    place: Any = SimpleNamespace(rank=0, leads_stage=leads)
    saver._world = place
    found = saver._gathered({"rank.00000": torch.ones(1), "model.a": torch.ones(2)})
    assert set(found) == {"rank.00000", *(["model.a"] if leads else [])}
    saver._world = world()
