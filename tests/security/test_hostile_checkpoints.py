"""Checkpoints that somebody else wrote, with right checksums: refused when read and by verify."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.checkpoint import catalogue, tensor_index
from drivetrain.checkpoint.manifest import (
    NAME,
    DamagedCheckpoint,
    File,
    Manifest,
    checksum,
    fingerprint,
)
from drivetrain.checkpoint.storage import LocalStorage
from drivetrain.checkpoint.whole_tensors import WholeTensors

WHOLE = Manifest(6, 1, {"dp_shard": 2}, "fsdp", {"step": 6})
FOLDER = WHOLE.folder
DATA = "data-00000.bin"
Index = dict[str, Any]


def _crc(data: bytes) -> str:
    return f"{zlib.crc32(data):08x}"


def _checkpoint(root: Path, change: Callable[[Index], None] = lambda _: None) -> LocalStorage:
    """Two tensors in two pieces each, then whatever the attacker does, with all sums put right."""
    data = bytes(torch.arange(8, dtype=torch.float32).view(torch.uint8).tolist())
    halves = [(0, data[:16]), (16, data[16:])]
    index: Index = {
        "model.a": {
            "dtype": "float32",
            "size": [2, 4],
            "chunks": [
                [[row, 0], [1, 4], DATA, start, 16, _crc(part)]
                for row, (start, part) in enumerate(halves)
            ],
        }
    }
    change(index)
    text = json.dumps(index).encode()
    folder = root / FOLDER
    folder.mkdir(parents=True)
    (folder / DATA).write_bytes(data)
    (folder / tensor_index.NAME).write_bytes(text)
    files = (File(DATA, 32, _crc(data)), File(tensor_index.NAME, len(text), checksum(text)))
    (folder / NAME).write_bytes(replace(WHOLE, files=files).to_json())
    return LocalStorage(root)


def _refused(storage: LocalStorage, match: str) -> None:
    with pytest.raises(DamagedCheckpoint, match=match):
        catalogue.verify(storage, FOLDER)
    with pytest.raises(DamagedCheckpoint, match=match):
        tensors = WholeTensors(storage, catalogue.read_manifest(storage, FOLDER))
        [tensors.read(name) for name in tensors.names()]


def test_a_good_one_is_read_and_verified(tmp_path: Path) -> None:
    storage = _checkpoint(tmp_path)
    assert catalogue.verify(storage, FOLDER).step == 6
    whole = WholeTensors(storage, catalogue.read_manifest(storage, FOLDER)).read("model.a")
    assert whole.flatten().tolist() == list(range(8))


@pytest.mark.parametrize("name", ["../../secret", "/etc/hostname", "..", "a/b", "", 5, "x\n"])
def test_a_piece_of_a_file_elsewhere_is_refused(tmp_path: Path, name: Any) -> None:
    secret = b"not for everybody"
    (tmp_path / "secret").write_bytes(secret)

    def leak(index: Index) -> None:
        size = len(secret)
        index["model.leak"] = {
            "dtype": "uint8",
            "size": [size],
            "chunks": [[[0], [size], name, 0, size, _crc(secret)]],
        }

    _refused(_checkpoint(tmp_path / "run", leak), "model.leak.*not a file of this checkpoint")


def _set(key: str, value: Any) -> Callable[[Index], None]:
    return lambda index: index["model.a"].update({key: value})


def _chunk(number: int, position: int, value: Any) -> Callable[[Index], None]:
    def change(index: Index) -> None:
        index["model.a"]["chunks"][number][position] = value

    return change


def _same_twice(index: Index) -> None:
    """As many numbers as there should be, but one half twice and the other never."""
    chunks = index["model.a"]["chunks"]
    chunks[1] = chunks[0]


def _same_bytes(index: Index) -> None:
    chunks = index["model.a"]["chunks"]
    chunks[1] = [chunks[1][0], *chunks[0][1:]]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (_same_twice, "overlap"),
        (_same_bytes, "overlap"),
        (_chunk(1, 0, [0, 2]), "outside"),
        (_chunk(1, 0, [-1, 0]), "cannot be read|outside"),
        (_chunk(1, 1, [-1, -4]), "cannot be read|outside"),
        (_chunk(1, 1, [2**40, 4]), "outside"),
        (_set("size", [2**40]), "do not cover|outside|cannot be read"),
        (_set("size", [-2, -4]), "cannot be read"),
        (_set("size", [2.0, 4]), "cannot be read"),
        (_set("size", [True, 4]), "cannot be read"),
        (_chunk(0, 3, -16), "outside"),
        (_chunk(0, 3, 32), "outside"),
        (_chunk(0, 4, 2**60), "outside"),
        (_chunk(0, 4, 8), "wrong size"),
        (_set("dtype", "__loader__"), "cannot be read"),
        (_set("dtype", "quint8"), "cannot be read|wrong size"),
        (_set("dtype", ["float32"]), "cannot be read"),
        (_set("chunks", []), "do not cover"),
        (_set("chunks", {}), "do not cover|cannot be read"),
        (_set("chunks", [[[0, 0]]]), "cannot be read"),
    ],
)
def test_a_wrong_index_is_refused(
    tmp_path: Path, change: Callable[[Index], None], match: str
) -> None:
    _refused(_checkpoint(tmp_path, change), match)


def test_a_wrong_index_as_a_whole_is_refused(tmp_path: Path) -> None:
    for number, text in enumerate([b"[]", b"5", b"{", b"[" * 100_000, b"\xff"]):
        storage = _checkpoint(tmp_path / str(number))
        (storage.path / FOLDER / tensor_index.NAME).write_bytes(text)
        old = Manifest.from_json((storage.path / FOLDER / NAME).read_bytes())
        files = (old.files[0], File(tensor_index.NAME, len(text), checksum(text)))
        (storage.path / FOLDER / NAME).write_bytes(replace(old, files=files).to_json())
        _refused(storage, "cannot be read")


def _remade(storage: LocalStorage, change: Callable[[dict[str, Any]], Any]) -> None:
    path = storage.path / FOLDER / NAME
    body = json.loads(path.read_bytes())
    del body["self_crc32"]
    change(body)
    path.write_text(json.dumps({**body, "self_crc32": fingerprint(body)}))


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m["files"].append({"name": "../../secret", "size": 1, "crc32": "00000000"}),
        lambda m: m["files"].append({"name": "/etc/passwd", "size": 1, "crc32": "00000000"}),
        lambda m: m["files"].append({"name": 5, "size": 1, "crc32": "00000000"}),
        lambda m: m["files"].append({"name": "x", "size": "1", "crc32": "00000000"}),
        lambda m: m["files"].append({"name": "x", "size": -1, "crc32": "00000000"}),
        lambda m: m["files"].append({"name": "x", "size": 1, "crc32": None}),
        lambda m: m.update(files={"a": 1}),
        lambda m: m.update(step="six"),
        lambda m: m.update(step=True),
        lambda m: m.update(layout=[1]),
        lambda m: m.update(layout={"tp": "x"}),
        lambda m: m.update(created_s="x"),
        lambda m: m.update(created_s=1e400),
        lambda m: m.update(created_s=1e300),
        lambda m: m.update(values=[]),
        lambda m: m.update(contents="nothing"),
        lambda m: m.update(strategy=5),
        lambda m: m.update(contract=[1]),
        lambda m: m.update(extra=1),
        lambda m: m.pop("step"),
    ],
)
def test_a_wrong_manifest_is_damage(
    tmp_path: Path, change: Callable[[dict[str, Any]], Any]
) -> None:
    storage = _checkpoint(tmp_path)
    _remade(storage, change)
    (entry,) = catalogue.entries(storage)
    assert entry.state == "damaged"
    assert entry.problem.startswith(NAME)


def _pipe(path: Path) -> None:
    os.mkfifo(path)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "make",
    [_pipe, Path.mkdir, lambda path: path.symlink_to("/dev/zero")],
    ids=["pipe", "folder", "device"],
)
@pytest.mark.parametrize("name", [NAME, tensor_index.NAME, DATA])
def test_what_is_no_file_is_damage(tmp_path: Path, name: str, make: Callable[[Path], None]) -> None:
    storage = _checkpoint(tmp_path)
    (storage.path / FOLDER / name).unlink()
    make(storage.path / FOLDER / name)
    (entry,) = catalogue.entries(storage)
    assert entry.state == "damaged"


def test_digits_of_other_scripts_make_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "step-٠٠٠٠٠٠٠٠٦-a١").mkdir()
    assert catalogue.entries(LocalStorage(tmp_path)) == []
