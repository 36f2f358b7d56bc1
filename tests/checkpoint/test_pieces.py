"""Whole tensors and pieces: who holds what, who writes what."""

from __future__ import annotations

import errno
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)

from drivetrain.checkpoint import lineage, shards
from drivetrain.checkpoint.failures import RanksFailed
from drivetrain.checkpoint.manifest import DamagedCheckpoint, File, Manifest, Reference, checksum
from drivetrain.checkpoint.shards import ShardReader, ShardWriter
from drivetrain.checkpoint.sharing import Held, answers, homes_of, keys_of, own_share
from drivetrain.checkpoint.storage import LocalStorage
from drivetrain.checkpoint.whole_tensors import WholeTensors
from tests.checkpoint.parts import DATA, metadata, tensors, written


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

    def __call__(self, files: list[File], referred: tuple[Reference, ...]) -> None:
        assert referred == ()
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
    assert writer._files == [File("data-00000.bin", 20, checksum(whole))]


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
