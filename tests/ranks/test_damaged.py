"""Damaged checkpoints: each is found, none is loaded, the next good one is used, and why is said.

Real ones, written by a run and then spoilt. Where only a later line of defence is to be tried, the
checksums before it are made to fit again.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.checkpoint import catalogue, manifest, tensor_index
from drivetrain.checkpoint.manifest import DamagedCheckpoint, checksum
from drivetrain.checkpoint.storage import storage_at
from drivetrain.core.errors import EnvironmentProblem
from drivetrain.train.history import History
from drivetrain.train.saving.weights import weights_sha256
from drivetrain.train.trainer import Trainer
from tests.ranks.resuming import go_on_in, make_sums_fit
from tests.ranks.small_task import samples, small_task

DATA, INDEX, MANIFEST = "data-00000.bin", tensor_index.NAME, manifest.NAME
OLDER, NEWEST = "step-000000002-a1", "step-000000004-a1"


def train(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[History, str]:
    go_on_in(run_dir, monkeypatch)
    trainer = Trainer(
        small_task(),
        {
            "global_batch_size": 8,
            "max_steps": 4,
            "checkpoint": {"every_steps": 2},
            "record": {"progress": "plain", "sinks": []},
        },
    )
    history = trainer.fit(samples())
    return history, weights_sha256(dict(trainer.model.state_dict()))


@dataclass(frozen=True)
class Good:
    """A run with two good checkpoints, and the weights it came to."""

    path: Path
    sha256: str


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Good:
    path = tmp_path_factory.mktemp("good") / "run"
    with pytest.MonkeyPatch.context() as monkeypatch:
        _, sha256 = train(path, monkeypatch)
    assert {OLDER, NEWEST} <= set(os.listdir(path / "checkpoints"))
    return Good(path, sha256)


# Ways to spoil the newest checkpoint; each gets its folder.

Spoil = Callable[[Path], None]


def first(size: int) -> int:
    return 0


def middle(size: int) -> int:
    return size // 2


def last(size: int) -> int:
    return size - 1


def cut(name: str, keep: Callable[[int], int]) -> Spoil:
    def spoil(folder: Path) -> None:
        os.truncate(folder / name, keep((folder / name).stat().st_size))

    return spoil


def flip(name: str, at: Callable[[int], int]) -> Spoil:
    def spoil(folder: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        content[at(len(content))] ^= 0b100
        (folder / name).write_bytes(content)

    return spoil


def remove(name: str) -> Spoil:
    return lambda folder: (folder / name).unlink()


def write(name: str, content: bytes) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / name).write_bytes(content)

    return spoil


def take_from_older(name: str) -> Spoil:
    def spoil(folder: Path) -> None:
        other = (folder.parent / OLDER / name).read_bytes()
        size = (folder / name).stat().st_size  # steps differ by some bytes
        (folder / name).write_bytes(other[:size].ljust(size, b"\0"))

    return spoil


def edit_manifest(change: Callable[[dict[str, Any]], None]) -> Spoil:
    """Change it and make its own checksum fit."""

    def spoil(folder: Path) -> None:
        body = json.loads((folder / MANIFEST).read_bytes())
        del body["self_crc32"]
        change(body)
        fitting = checksum(json.dumps(body, sort_keys=True).encode())
        (folder / MANIFEST).write_text(json.dumps({**body, "self_crc32": fitting}))

    return spoil


def edit_index(change: Callable[[dict[str, Any]], None]) -> Spoil:
    """Change it and make the manifest fit, as an attacker or a broken tool would."""

    def spoil(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_bytes())
        change(index)
        (folder / INDEX).write_text(json.dumps(index))
        make_sums_fit(folder)

    return spoil


def flip_and_make_sums_fit(folder: Path) -> None:
    flip(DATA, lambda size: size // 3)(folder)
    make_sums_fit(folder)


def piece_beyond_the_file(index: dict[str, Any]) -> None:
    index["model.0.weight"]["chunks"][0][3] += 10**6


def piece_of_no_file(index: dict[str, Any]) -> None:
    index["model.0.weight"]["chunks"][0][2] = "data-00007.bin"


def wider_dtype(index: dict[str, Any]) -> None:
    index["model.0.weight"]["dtype"] = "float64"


def no_dtype(index: dict[str, Any]) -> None:
    index["model.0.weight"]["dtype"] = "load"


def no_pieces(index: dict[str, Any]) -> None:
    index["model.0.weight"]["chunks"] = []


def no_own_state(index: dict[str, Any]) -> None:
    del index["rank.00000"]


class Hostile:
    """Unpickled, it makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def marker_of(folder: Path) -> Path:
    return folder.parents[2] / "the-pickle-was-run"


def own_state(make: Callable[[Path], bytes]) -> Spoil:
    """Other bytes as what rank 0 alone had, every checksum fitting."""

    def spoil(folder: Path) -> None:
        content = make(folder)
        start = (folder / DATA).stat().st_size
        with open(folder / DATA, "ab") as file:
            file.write(content)
        size = [len(content)]
        where = [[0], size, DATA, start, *size, checksum(content)]
        entry = {"dtype": "uint8", "size": size, "chunks": [where]}
        edit_index(lambda index: index.update({"rank.00000": entry}))(folder)

    return spoil


def hostile_pickle(folder: Path) -> bytes:
    return pickle.dumps(Hostile(marker_of(folder)), protocol=2)  # as torch writes


def hostile_torch_file(folder: Path) -> bytes:
    path = folder.parents[2] / "hostile.pt"
    torch.save({"random": Hostile(marker_of(folder))}, path)
    return path.read_bytes()


def archive_of_nothing(folder: Path) -> bytes:
    return b"PK\x03\x04" + bytes(99)


def nothing(folder: Path) -> bytes:
    return b""


def a_later_attempt_went_on_from_step_2(folder: Path) -> None:
    (folder.parent / "attempt-00002.json").write_text('{"resumed_step": 2}')


def a_file_instead(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("a checkpoint was here")


def nothing_in_it(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def manifest_of_older(folder: Path) -> None:
    shutil.copy(folder.parent / OLDER / MANIFEST, folder / MANIFEST)


def lose_key(body: dict[str, Any]) -> None:
    del body["layout"]


UNFINISHED = "no manifest.json: the save did not finish"
PIECE = "data-00000.bin is damaged at"
OWN_STATE = "a rank's own state cannot be read"
UNREADABLE = "manifest.json cannot be read"
CASES: dict[str, tuple[Spoil, str]] = {
    "data cut in half": (cut(DATA, middle), "data-00000.bin has"),
    "data one byte short": (cut(DATA, last), "data-00000.bin has"),
    "data one byte long": (cut(DATA, lambda size: size + 1), "data-00000.bin has"),
    "data empty": (cut(DATA, first), "data-00000.bin has 0 bytes, not"),
    "bit at the start": (flip(DATA, first), PIECE),
    "bit in the middle": (flip(DATA, middle), PIECE),
    "bit at the end": (flip(DATA, last), PIECE),
    "bit, file's checksum fits": (flip_and_make_sums_fit, PIECE),
    "data of another step": (take_from_older(DATA), PIECE),
    "data missing": (remove(DATA), "data-00000.bin is missing"),
    "bit in the index": (flip(INDEX, middle), "index.json does not match"),
    "index missing": (remove(INDEX), "index.json is missing"),
    "index cut": (cut(INDEX, lambda size: size - 2), "index.json has"),
    "index beyond the file": (edit_index(piece_beyond_the_file), "outside of data-00000.bin"),
    "index of no file": (
        edit_index(piece_of_no_file),
        "'data-00007.bin', not a file of this checkpoint",
    ),
    "index with a wider dtype": (
        edit_index(wider_dtype),
        "gives the wrong size for model.0.weight",
    ),
    "index with no dtype": (edit_index(no_dtype), "index.json cannot be read"),
    "index without pieces": (edit_index(no_pieces), "model.0.weight"),
    "index without own state": (edit_index(no_own_state), "rank.00000"),
    "manifest missing": (remove(MANIFEST), UNFINISHED),
    "manifest empty": (write(MANIFEST, b""), UNREADABLE),
    "manifest no JSON": (write(MANIFEST, b"\x80\x04\x95 no text"), UNREADABLE),
    "manifest a list": (write(MANIFEST, b"[1, 2]"), UNREADABLE),
    "bit in the manifest": (flip(MANIFEST, middle), "manifest.json"),
    "manifest of another step": (manifest_of_older, f"manifest.json belongs to {OLDER}"),
    "manifest of a later release": (
        edit_manifest(lambda body: body.update(format=3)),
        "manifest.json has format 3; this release reads 1 and 2",
    ),
    "manifest without layout": (edit_manifest(lose_key), "manifest.json is not valid"),
    "hostile pickle": (own_state(hostile_pickle), OWN_STATE),
    "hostile torch file": (own_state(hostile_torch_file), OWN_STATE),
    "own state no archive": (own_state(archive_of_nothing), OWN_STATE),
    "own state empty": (own_state(nothing), OWN_STATE),
    "folder empty": (nothing_in_it, UNFINISHED),
    "a file for a folder": (a_file_instead, UNFINISHED),
    "a replaced attempt's": (
        a_later_attempt_went_on_from_step_2,
        "written by an attempt that another one had replaced",
    ),
}
assert len(CASES) >= 20


@pytest.mark.parametrize("case", CASES)
def test_it_is_passed_over(
    case: str,
    good: Good,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "run"
    shutil.copytree(good.path, run)
    spoil, reason = CASES[case]
    spoil(run / "checkpoints" / NEWEST)
    history, sha256 = train(run, monkeypatch)
    (said,) = (line for line in capsys.readouterr().out.splitlines() if "was skipped" in line)
    assert said.startswith(f"warning: checkpoint {NEWEST} was skipped (")
    assert reason in said
    assert said.endswith(f"); {OLDER} is used instead")
    assert history.resumed_step == 2
    assert [metrics.step for metrics in history.steps] == [3, 4]
    assert sha256 == good.sha256, "weights, optimizer and random streams are the older one's"
    assert not marker_of(run / "checkpoints" / NEWEST).exists()


# What only the tensors' own checks can find, since every checksum fits.
FITTING = {case for case in CASES if case.startswith(("index ", "own state", "hostile"))}
FITTING |= {"bit, file's checksum fits", "a replaced attempt's"}
FITTING -= {"index missing", "index cut"}


@pytest.mark.parametrize("case", sorted(CASES.keys() - FITTING))
def test_verify_finds_it(case: str, good: Good, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(good.path, run)
    storage = storage_at(run / "checkpoints")
    catalogue.verify(storage, NEWEST)
    CASES[case][0](run / "checkpoints" / NEWEST)
    with pytest.raises(DamagedCheckpoint):
        catalogue.verify(storage, NEWEST)


@pytest.mark.parametrize("name", [".metadata", "data-00001.bin"])
def test_a_foreign_file_is_named_and_never_read(
    name: str, good: Good, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    shutil.copytree(good.path, run)
    folder = run / "checkpoints" / NEWEST
    (folder / name).write_bytes(hostile_pickle(folder))
    with pytest.raises(DamagedCheckpoint, match=re.escape(f"{name} is not in the manifest")):
        catalogue.verify(storage_at(run / "checkpoints"), NEWEST)
    history, sha256 = train(run, monkeypatch)
    assert (history.resumed_step, sha256) == (4, good.sha256)
    assert not marker_of(folder).exists()


def test_a_hostile_pickle_would_have_been_run(good: Good, tmp_path: Path) -> None:
    """Or else the tests above prove nothing."""
    folder = tmp_path / "run" / "checkpoints" / NEWEST
    folder.mkdir(parents=True)
    pickle.loads(hostile_pickle(folder))  # noqa: S301
    assert marker_of(folder).exists()


@pytest.mark.parametrize(
    "spoil",
    [remove(DATA), flip(DATA, last), own_state(hostile_pickle)],
    ids=["data", "own state", "pickle"],
)
def test_none_is_good_and_a_person_must_decide(
    spoil: Spoil, good: Good, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    shutil.copytree(good.path, run)
    for folder in (OLDER, NEWEST):
        spoil(run / "checkpoints" / folder)
    both = rf"no checkpoint is good: {NEWEST} \(.+\), {OLDER} \(.+\); remove them"
    with pytest.raises(EnvironmentProblem, match=both):
        train(run, monkeypatch)
    assert {OLDER, NEWEST} <= {path.name for path in (run / "checkpoints").iterdir()}


def test_half_of_a_damaged_checkpoint_is_never_trained_on(
    good: Good, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Damage in a later tensor is found when earlier ones have been overwritten already."""
    run = tmp_path / "run"
    shutil.copytree(good.path, run)
    shutil.rmtree(run / "checkpoints" / OLDER)
    flip(DATA, lambda size: size // 3)(run / "checkpoints" / NEWEST)
    one = rf"no checkpoint is good: {NEWEST} \(.*{PIECE}.*\); remove them"
    with pytest.raises(EnvironmentProblem, match=one):
        train(run, monkeypatch)


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("spoiled", [b"", b"\x00", b'{"resumed_step": 0, "attempt": 2}'])
def test_a_claim_that_cannot_be_read_stops_the_start_and_nothing_is_deleted(
    spoiled: bytes, good: Good, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    shutil.copytree(good.path, run)
    claim = run / "checkpoints" / "attempt-00002.json"
    claim.write_bytes(spoiled)
    before = contents(run / "checkpoints")
    with pytest.raises(EnvironmentProblem, match=r"attempt-00002\.json.*delete this file"):
        train(run, monkeypatch)
    assert contents(run / "checkpoints") == before
    claim.unlink()
    history, sha256 = train(run, monkeypatch)
    assert (history.resumed_step, sha256) == (4, good.sha256)
