"""An export's memory does not grow with the model; nor is freed memory kept by ranks in shards."""

from __future__ import annotations

import subprocess
import sys
import zipfile
import zlib
from pathlib import Path

import pytest
import torch

from drivetrain import ConfigError
from drivetrain.checkpoint import lineage, tensor_index
from drivetrain.checkpoint.export import LEAST_SHARD_BYTES, export_weights
from drivetrain.checkpoint.locate import locate
from drivetrain.checkpoint.manifest import NAME, File, Manifest
from drivetrain.checkpoint.storage import LocalStorage
from drivetrain.checkpoint.weight_files import MAX_SHARD_BYTES
from drivetrain.train.host_memory import give_back_freed

LARGE_BYTES = 160 << 20
MOST_GROWTH = 64 << 20


def save(folder: Path, num_rows: int) -> None:
    """A checkpoint of one matrix, in four pieces, as ranks would have written it."""
    storage = LocalStorage(folder)
    lineage.claim_next(storage, 0)
    rows, width = num_rows // 4, 1024
    files, chunks = [], []
    for rank in range(4):
        data = torch.full((rows, width), float(rank)).numpy().tobytes()
        name, crc32 = f"data-{rank:05d}.bin", f"{zlib.crc32(data):08x}"
        with storage.writing(f"step-000000001-a1/{name}") as file:
            file.write(data)
        files.append(File(name, len(data), crc32))
        chunks.append([[rank * rows, 0], [rows, width], name, 0, len(data), crc32])
    index = {"model.weight": {"dtype": "float32", "size": [num_rows, width], "chunks": chunks}}
    with storage.writing(f"step-000000001-a1/{tensor_index.NAME}") as file:
        size, crc32 = tensor_index.write_lines([str(index).replace("'", '"').encode()], file)
    manifest = Manifest(
        step=1,
        attempt=1,
        layout={},
        strategy="fsdp",
        position={},
        contents="everything",
        values={},
        contract={},
        versions={},
        created_s=0.0,
        files=(*files, File(tensor_index.NAME, size, crc32)),
    )
    storage.put(f"step-000000001-a1/{NAME}", manifest.to_json())


EXPORT = """
import sys
from pathlib import Path
from drivetrain.cli.main import app
app(["checkpoint", "export", *sys.argv[1:]], standalone_mode=False)
status = Path("/proc/self/status").read_text().splitlines()
print("peak", next(line for line in status if line.startswith("VmHWM")).split()[1])
"""


def peak_of_export(source: Path, target: Path) -> int:
    """Of the verb's own process; `ru_maxrss` would have this one's in it."""
    argv = [sys.executable, "-c", EXPORT, str(source), str(target)]
    said = subprocess.run(argv, check=True, capture_output=True, text=True).stdout
    return int(said.split()[-1]) * 1024


@pytest.mark.parametrize(
    "target", [pytest.param("folder", marks=[pytest.mark.slow, pytest.mark.long]), "weights.pt"]
)
def test_a_large_model_takes_no_more_than_a_small_one(target: str, tmp_path: Path) -> None:
    peaks = {}
    for name, num_bytes in (("small", 1 << 20), ("large", LARGE_BYTES)):
        save(tmp_path / name, num_bytes // 4096)
        peaks[name] = peak_of_export(tmp_path / name, tmp_path / f"{name}-{target}")
    assert peaks["large"] - peaks["small"] < MOST_GROWTH, peaks
    if target == "weights.pt":
        path = tmp_path / f"large-{target}"
        assert zipfile.ZipFile(path).testzip() is None, "a zip like any other"
        weight = torch.load(path, weights_only=True, mmap=True)["weight"]
        assert weight[:: len(weight) // 4, 0].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_glibc_is_left_as_its_user_has_set_it_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    assert not give_back_freed()


def test_freed_blocks_are_given_back() -> None:
    """Half of many blocks of 2 MB, every other one: holes that no heap can shrink around."""
    code = """
import ctypes, sys, torch
from drivetrain.train.host_memory import give_back_freed
if sys.argv[1] == "on":
    assert give_back_freed()
torch.empty(30 << 20, dtype=torch.uint8)  # what makes glibc keep blocks of this size
blocks = [torch.ones(2 << 20, dtype=torch.uint8) for _ in range(100)]
rss = lambda: int(open("/proc/self/statm").read().split()[1]) * 4096
before = rss()
del blocks[::2]
print(before - rss())
"""
    given = {
        way: int(subprocess.check_output([sys.executable, "-c", code, way]).decode())
        for way in ("on", "off")
    }
    assert given["off"] < 20 << 20, given
    assert given["on"] > 80 << 20, given


def test_two_exports_of_a_checkpoint_are_the_same_file(tmp_path: Path) -> None:
    save(tmp_path / "run", 64)
    located = locate(str(tmp_path / "run"))
    for name in ("one.pt", "other.pt"):
        export_weights(located.storage, located.choose(), tmp_path / name)
    assert (tmp_path / "one.pt").read_bytes() == (tmp_path / "other.pt").read_bytes()
    assert torch.load(tmp_path / "one.pt", weights_only=True)["weight"].shape == (64, 1024)


def test_averages_that_were_never_saved_are_not_the_weights(tmp_path: Path) -> None:
    save(tmp_path / "run", 4)
    located = locate(str(tmp_path / "run"))
    with pytest.raises(ConfigError) as error:
        export_weights(located.storage, located.choose(), tmp_path / "weights.pt", averages=True)
    assert str(error.value) == (
        "--ema: step-000000001-a1 has no averaged weights; train with the EMA hook"
    )
    assert not (tmp_path / "weights.pt").exists()


def test_sizes_of_weight_files() -> None:
    """What people who move them about go by; docs/checkpoints.md and docs/exports.md have them."""
    assert (LEAST_SHARD_BYTES, MAX_SHARD_BYTES) == (1_000_000_000, 5_000_000_000)
