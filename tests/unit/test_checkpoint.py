"""The parts of a checkpoint, each alone: from the manifest to the storage it lies in."""

from __future__ import annotations

import errno
import json
import math
import os
import threading
import uuid
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.checkpoint import catalogue, lineage
from drivetrain.checkpoint.checkpointer import Checkpointer
from drivetrain.checkpoint.interval import MOST_BETWEEN_SAVES_S, Interval, best_interval
from drivetrain.checkpoint.locate import locate
from drivetrain.checkpoint.manifest import (
    NAME,
    DamagedCheckpoint,
    File,
    Manifest,
    checksum,
    folder_name,
    parse_folder,
)
from drivetrain.checkpoint.retention import outdated
from drivetrain.checkpoint.state import pack, unpack
from drivetrain.checkpoint.storage import LocalStorage, RemoteStorage, Storage, storage_at
from drivetrain.cluster.environments import Identity
from drivetrain.config.schema import Checkpoint
from drivetrain.core.errors import ConfigError, DamagedRun, DrivetrainError, EnvironmentProblem
from drivetrain.core.redaction import REMOVED
from drivetrain.parallel.layout import Layout
from drivetrain.parallel.world import World

# Manifest


def manifest(step: int = 7, attempt: int = 1) -> Manifest:
    layout = {"pp": 1, "dp_replicate": 2, "dp_shard": 1, "cp": 1, "tp": 1}
    return Manifest(step, attempt, layout, "ddp", {"step": step}, values={"lr": [0.1, math.pi]})


def test_a_manifest_comes_back_as_it_was() -> None:
    whole = replace(manifest(), files=(File("data-00000.bin", 3, checksum(b"abc")),))
    assert Manifest.from_json(whole.to_json()) == whole
    assert whole.num_bytes == 3


@given(st.data())
def test_no_flipped_bit_of_a_manifest_goes_unnoticed(data: st.DataObject) -> None:
    good = manifest()
    content = bytearray(good.to_json())
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= 1 << data.draw(st.integers(0, 7))
    try:
        read = Manifest.from_json(bytes(content))
    except DamagedCheckpoint:
        return
    # spaces between two values, or how a number is written, are nothing a manifest says
    assert read == good


def test_folders_sort_by_step_and_nothing_else_is_one() -> None:
    names = [folder_name(step, 1) for step in (5, 40, 1_000_000)]
    assert names == sorted(names)
    assert [parse_folder(name) for name in names] == [(5, 1), (40, 1), (1_000_000, 1)]
    for other in ("step-5", "weights.pt", "attempt-00001.json", "step-000000005-a1.tmp", ""):
        assert parse_folder(other) is None


# Lineage and catalogue


def commit(storage: Storage, step: int, attempt: int, content: bytes = b"data") -> str:
    """A checkpoint with one file, committed as the checkpointer does."""
    file = File("data-00000.bin", len(content), checksum(content))
    whole = replace(manifest(step, attempt), files=(file,))
    storage.put(f"{whole.folder}/{file.name}", content)
    storage.put(f"{whole.folder}/{NAME}", whole.to_json())
    return whole.folder


def states(storage: Storage) -> dict[str, str]:
    return {entry.folder: entry.state for entry in catalogue.entries(storage)}


def test_attempts_get_numbers_of_their_own(tmp_path: Path) -> None:
    storage = storage_at(tmp_path)
    assert [lineage.claim_next(storage, step).attempt for step in (0, 10, 10)] == [1, 2, 3]
    assert lineage.claim_next(storage, 20, at_least=7) == lineage.Claim(7, 20)
    assert [claim.step for claim in lineage.read_claims(storage)] == [0, 10, 10, 20]


def test_attempts_that_claim_at_once_get_different_numbers(tmp_path: Path) -> None:
    storage = storage_at(tmp_path)
    start = threading.Barrier(8)
    numbers: list[int] = []

    def claim() -> None:
        start.wait()
        numbers.append(lineage.claim_next(storage, 0).attempt)

    threads = [threading.Thread(target=claim) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(numbers) == list(range(1, 9))


def test_what_a_stale_attempt_commits_late_is_not_part_of_the_run(tmp_path: Path) -> None:
    storage = storage_at(tmp_path)
    lineage.claim_next(storage, 0)
    commit(storage, 10, 1)
    lineage.claim_next(storage, 10)
    lineage.check_not_stale(storage, 2)
    with pytest.raises(lineage.StaleAttempt, match="attempt 2 has taken over") as caught:
        lineage.check_not_stale(storage, 1)
    assert caught.value.exit_code == 77
    commit(storage, 15, 2)
    # it was between its check and its manifest when the other one claimed the run
    late = commit(storage, 20, 1)
    assert states(storage) == {
        late: "replaced",
        folder_name(15, 2): "good",
        folder_name(10, 1): "good",
    }


UNREADABLE = {
    "empty": b"",
    "no JSON": b"\x00",
    "a list": b"[2]",
    "no step": b'{"host": "a", "time_s": 1.0}',
    "step no number": b'{"resumed_step": "ten"}',
    "step below zero": b'{"resumed_step": -1}',
    "more than it can say": b'{"resumed_step": 10, "self_crc33": "00000000"}',
}


@pytest.mark.parametrize("content", UNREADABLE.values(), ids=UNREADABLE)
def test_a_claim_nobody_can_read_is_for_a_person_to_decide(tmp_path: Path, content: bytes) -> None:
    storage = storage_at(tmp_path)
    lineage.claim_next(storage, 0)
    commit(storage, 10, 1)
    (tmp_path / "attempt-00002.json").write_bytes(content)
    before = sorted(tmp_path.rglob("*"))
    for asks in (
        lambda: catalogue.entries(storage),
        lambda: lineage.claim_next(storage, 10),
    ):
        with pytest.raises(EnvironmentProblem, match=r"attempt-00002\.json.*delete this file"):
            asks()
    assert sorted(tmp_path.rglob("*")) == before


def test_a_claim_nobody_can_read_still_fences_who_runs(tmp_path: Path) -> None:
    storage = storage_at(tmp_path)
    lineage.claim_next(storage, 0)
    (tmp_path / "attempt-00002.json").write_bytes(b"")
    with pytest.raises(lineage.StaleAttempt, match="attempt 2 has taken over"):
        lineage.check_not_stale(storage, 1)


def test_no_flipped_bit_of_a_claim_goes_unnoticed(tmp_path: Path) -> None:
    storage = storage_at(tmp_path)
    lineage.claim_next(storage, 40)
    path = tmp_path / "attempt-00001.json"
    good = path.read_bytes()
    for bit in range(8 * len(good)):
        spoilt = bytearray(good)
        spoilt[bit // 8] ^= 1 << bit % 8
        path.write_bytes(spoilt)
        try:
            read = lineage.read_claims(storage)
        except EnvironmentProblem:
            continue
        # how a number is written is nothing a claim says
        assert read == [lineage.Claim(1, 40)], spoilt


def test_a_claim_is_not_read_under_another_number(tmp_path: Path) -> None:
    storage = storage_at(tmp_path)
    lineage.claim_next(storage, 0)
    (tmp_path / "attempt-00001.json").rename(tmp_path / "attempt-00002.json")
    with pytest.raises(EnvironmentProblem, match="it belongs to attempt 1"):
        lineage.read_claims(storage)


def test_a_claim_of_an_earlier_release_has_no_checksum_and_is_read(tmp_path: Path) -> None:
    storage = storage_at(tmp_path)
    facts = {"resumed_step": 10, "host": "a", "time_s": 1.5}
    storage.put("attempt-00002.json", json.dumps(facts).encode())
    assert lineage.read_claims(storage) == [lineage.Claim(2, 10)]


def test_a_number_whose_claim_was_deleted_is_not_given_again(tmp_path: Path) -> None:
    storage = storage_at(tmp_path)
    lineage.claim_next(storage, 0)
    commit(storage, 10, 2)
    assert lineage.claim_next(storage, 10).attempt == 3, "or it would write into step-…-a2"


def test_the_catalogue_tells_good_from_unfinished_from_damaged(tmp_path: Path) -> None:
    storage = storage_at(tmp_path)
    short, fine = commit(storage, 20, 1), commit(storage, 10, 1)
    storage.put(f"{folder_name(30, 1)}/data-00000.bin", b"half")
    storage.put("weights.pt", b"not a checkpoint")
    storage.put(f"{short}/data-00000.bin", b"dat")
    assert list(states(storage).items()) == [
        (folder_name(30, 1), "unfinished"),
        (short, "damaged"),
        (fine, "good"),
    ]
    assert catalogue.entries(storage)[1].problem == "data-00000.bin has 3 bytes, not 4"


def test_verify_reads_what_the_catalogue_only_measures(tmp_path: Path) -> None:
    storage = storage_at(tmp_path)
    folder = commit(storage, 20, 1)
    catalogue.verify(storage, folder)
    storage.put(f"{folder}/data-00000.bin", b"dada")
    assert states(storage) == {folder: "good"}
    with pytest.raises(DamagedCheckpoint, match="data-00000.bin does not match its checksum"):
        catalogue.verify(storage, folder)


@pytest.mark.parametrize(
    ("step", "attempt", "belongs"),
    [(10, 1, True), (11, 1, False), (11, 2, True), (16, 2, False), (99, 3, True)],
)
def test_a_checkpoint_belongs_unless_a_later_attempt_went_on_from_before_it(
    step: int, attempt: int, belongs: bool
) -> None:
    claims = [lineage.Claim(1, 0), lineage.Claim(2, 10), lineage.Claim(3, 15)]
    assert lineage.belongs(step, attempt, claims) is belongs


def test_verify_finds_what_is_missing_what_is_strange_and_what_lies_elsewhere(
    tmp_path: Path,
) -> None:
    storage = storage_at(tmp_path)
    folder = commit(storage, 20, 1)
    assert catalogue.verify(storage, folder).step == 20
    storage.put(f"{folder}/a-stranger.bin", b"x")
    with pytest.raises(DamagedCheckpoint, match=r"a-stranger\.bin is not in the manifest"):
        catalogue.verify(storage, folder)
    storage.remove(f"{folder}/a-stranger.bin")
    storage.remove(f"{folder}/data-00000.bin")
    with pytest.raises(DamagedCheckpoint, match=r"data-00000\.bin is missing"):
        catalogue.verify(storage, folder)
    assert catalogue.read_manifest(storage, folder, check_sizes=False).step == 20
    (tmp_path / folder).rename(tmp_path / folder_name(21, 1))
    with pytest.raises(DamagedCheckpoint, match=f"belongs to {folder}"):
        catalogue.read_manifest(storage, folder_name(21, 1), check_sizes=False)
    (tmp_path / folder_name(22, 1) / NAME).mkdir(parents=True)
    with pytest.raises(DamagedCheckpoint, match="was not written by Drivetrain"):
        catalogue.read_manifest(storage, folder_name(22, 1))


def test_files_larger_than_a_block_are_read_to_their_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalogue, "_BLOCK", 4)
    storage = storage_at(tmp_path)
    for content in (b"", b"abcd", b"abcdefghi"):
        catalogue.verify(storage, commit(storage, 20, 1, content))
    storage.put(f"{folder_name(20, 1)}/data-00000.bin", b"abcdefghj")
    with pytest.raises(DamagedCheckpoint, match="does not match its checksum"):
        catalogue.verify(storage, folder_name(20, 1))


# Retention


@pytest.mark.parametrize(
    ("rule", "gone"),
    [
        ({}, [30, 20, 10]),
        ({"keep_last": 1}, [40, 30, 20, 10]),
        ({"keep_last": 9}, []),
        ({"keep_every": 20}, [30, 10]),
        ({"keep_best": "loss"}, [30, 10]),
        ({"keep_best": "loss", "keep_best_mode": "max"}, [20, 10]),
        ({"keep_last": 1, "keep_every": 40, "keep_best": "loss"}, [30, 10]),
    ],
)
def test_what_may_go(rule: dict[str, object], gone: list[int]) -> None:
    scores = {20: 0.5, 30: 0.9, 50: 0.7}
    assert outdated([10, 30, 20, 50, 40], Checkpoint.model_validate(rule), scores) == gone


def test_a_save_drops_what_is_outdated_or_was_replaced(tmp_path: Path) -> None:
    storage = storage_at(tmp_path)
    lineage.claim_next(storage, 0)
    for step in (10, 20, 30, 40):
        commit(storage, step, 1)
    lineage.claim_next(storage, 30)  # what attempt 1 saved at step 40 is not part of the run
    for step in (40, 50):
        commit(storage, step, 2)
    rule = Checkpoint(keep_last=2, keep_best="loss")
    identity = Identity("test", 0, 0, 1, 1, 0, "127.0.0.1", 0)
    world = World(identity, Layout(), torch.device("cpu"), None)
    checkpointer = Checkpointer(storage, rule, world, "ddp")
    checkpointer.attempt, checkpointer.scores = 2, {20: 0.1, 30: 0.4, 50: 0.2}
    checkpointer._drop_outdated()
    left = [folder_name(step, attempt) for step, attempt in ((20, 1), (40, 2), (50, 2))]
    assert [name for name in storage.names() if parse_folder(name)] == left


def test_of_damaged_checkpoints_the_newest_is_named_and_a_password_is_asked_for(
    tmp_path: Path,
) -> None:
    storage = storage_at(tmp_path)
    lineage.claim_next(storage, 0)
    storage.put(f"{commit(storage, 10, 1)}/data-00000.bin", b"cut")
    storage.remove(f"{commit(storage, 20, 1)}/data-00000.bin")
    with pytest.raises(DrivetrainError, match="^step-000000020-a1: data-00000.bin is missing"):
        locate(str(tmp_path)).choose()
    run = tmp_path / "run"
    run.mkdir()
    config = {"config": {"checkpoint": {"directory": f"s3://me:{REMOVED}@host/bucket"}}}
    (run / "run.yaml").write_text(json.dumps(config))
    with pytest.raises(ConfigError) as error:
        locate(str(run))
    assert str(error.value) == (
        f"checkpoint.directory = s3://me:{REMOVED}@host/bucket: the run does not store the "
        "password of this address; pass the address of the checkpoints instead of the run"
    )


def test_the_best_is_the_best_of_those_that_have_a_number() -> None:
    rule = Checkpoint(keep_last=1, keep_best="loss")
    assert outdated([1, 2, 3, 4], rule, {1: math.nan, 2: 0.3, 3: math.inf, 9: 0.1}) == [3, 1]
    assert outdated([1, 2], rule, None) == [1]
    assert outdated([1, 2], rule, {1: -math.inf}) == [1]


@given(st.lists(st.integers(0, 1000)), st.integers(1, 5))
def test_the_newest_always_stays(steps: Sequence[int], keep_last: int) -> None:
    gone = outdated(steps, Checkpoint(keep_last=keep_last))
    assert not set(gone) & set(sorted(set(steps))[-keep_last:])
    assert len(set(steps) - set(gone)) == min(keep_last, len(set(steps)))


# Interval


def test_the_interval_is_youngs() -> None:
    chosen = best_interval(save_s=2.0, step_s=0.5, num_failures=3, running_s=20 * 3600)
    between_s = (4 + 20) * 3600 / 4
    assert chosen.steps == round(math.sqrt(2 * 2.0 * between_s) / 0.5)
    assert "2000 ms a save × 6.0 h between failures" in chosen.why
    assert "3 failures in 20.0 h so far" in chosen.why


def test_the_interval_grows_with_cost_and_shrinks_with_failures() -> None:
    def seconds(save_s: float = 1.0, failures: int = 0, beside_s: float = 0.0) -> float:
        return best_interval(save_s, 0.1, failures, 3600.0, beside_s).steps * 0.1

    assert seconds(save_s=4.0) == pytest.approx(2 * seconds(save_s=1.0), rel=1e-2)
    assert seconds(failures=3) == pytest.approx(seconds() / 2, rel=1e-2)
    assert seconds(save_s=1e6) == pytest.approx(MOST_BETWEEN_SAVES_S)
    assert seconds(save_s=0.0, beside_s=500.0) == pytest.approx(1000.0), "saves must not pile up"
    assert best_interval(1.0, 1e9, 0, 0.0).steps == 1


def test_the_interval_says_how_it_came_about() -> None:
    assert best_interval(0.5, 0.25, 1, 1800.0, beside_s=3.0) == Interval(
        360,
        "√(2 × 500 ms a save × 2.2 h between failures) = 90 s = 360 steps of 250.0 ms "
        "(1 failure in 1800 s so far)",
    )
    assert "(2 failures in 1.0 h so far)" in best_interval(0.5, 0.25, 2, 3600.0).why
    assert "= 1 step of 10000000.0 ms" in best_interval(0.5, 1e4, 0, 0.0).why
    free = best_interval(0.0, 0.01, 0, 0.0)
    assert free.steps == round(math.sqrt(2 * 1e-3 * 4 * 3600) / 0.01), "no save is free"
    assert best_interval(1.0, 0.0, 0, 0.0).steps == round(math.sqrt(2 * 4 * 3600) / 1e-6)


# Places


@pytest.fixture(params=["local", "remote"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "local":
        return storage_at(tmp_path / "not" / "yet")
    return storage_at(f"memory://{tmp_path.name}")


def test_a_place_keeps_what_it_is_given(storage: Storage) -> None:
    assert storage.names() == []
    assert storage.size("a/b.bin") is None
    storage.put("a/b.bin", b"0123456789")
    with storage.writing("a/c.bin") as file:
        file.write(b"01234")
        file.write(memoryview(b"56789"))
    assert storage.names() == ["a"]
    assert storage.names("a") == ["b.bin", "c.bin"]
    assert storage.names("elsewhere") == []
    assert storage.size("a/c.bin") == 10
    for name in ("a/b.bin", "a/c.bin"):
        assert storage.read(name) == b"0123456789"
        assert storage.read(name, 3, 4) == b"3456"
        assert storage.read(name, 10, 0) == b""
    storage.put("a/b.bin", b"new")
    assert storage.read("a/b.bin") == b"new"
    with pytest.raises(FileNotFoundError):
        storage.read("a/d.bin")


def test_a_folder_is_no_file_and_a_file_no_folder(tmp_path: Path) -> None:
    storage = storage_at(tmp_path)
    storage.put("a/b.bin", b"1")
    assert storage.size("a") is None
    assert storage.names("a/b.bin") == []
    with pytest.raises(DamagedRun, match="a folder, not a file"):
        storage.read("a")


def test_what_is_too_large_is_not_read(storage: Storage) -> None:
    storage.put("a.bin", b"0123456789")
    assert storage.read("a.bin", most=10) == b"0123456789"
    assert storage.read("a.bin", 3, most=7) == b"3456789"
    for start, most in ((0, 9), (3, 6)):
        with pytest.raises(DamagedRun):
            storage.read("a.bin", start, most=most)


def test_only_one_can_create(storage: Storage) -> None:
    assert storage.create("claim", b"first")
    assert not storage.create("claim", b"second")
    assert storage.read("claim") == b"first"
    assert storage.names() == ["claim"], "nothing is left of the second"


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOTSUP, errno.ENOSYS])
def test_without_hard_links_only_one_can_create_and_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def no_links(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    synced: list[int] = []
    sync = os.fsync

    def noted_sync(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_ino)
        sync(descriptor)

    monkeypatch.setattr(os, "link", no_links)
    monkeypatch.setattr(os, "fsync", noted_sync)
    storage = storage_at(tmp_path)
    with pytest.warns(UserWarning, match="not support hard links.*one at a time"):
        assert storage.create("claim", b"first")
    assert (tmp_path / "claim").stat().st_ino in synced, "a power cut would leave an empty claim"
    assert not storage.create("claim", b"second")
    assert storage.read("claim") == b"first"
    assert storage.names() == ["claim"]


class Careless(MemoryFileSystem):  # type: ignore[misc]
    """A store that does not heed the condition of a write."""

    protocol = "careless"

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **more: object) -> None:
        super().pipe_file(path, value, **more)


class Old(MemoryFileSystem):  # type: ignore[misc]
    """A library that knows of no conditions."""

    protocol = "old"

    def pipe_file(self, path: str, value: bytes) -> None:
        super().pipe_file(path, value)


@pytest.mark.parametrize("store", [Careless, Old])
def test_a_store_that_lets_two_create_is_said(store: type[MemoryFileSystem]) -> None:
    fsspec.register_implementation(store.protocol, store, clobber=True)
    storage = storage_at(f"{store.protocol}://bucket/{uuid.uuid4().hex}")
    with pytest.warns(UserWarning, match="same moment.*start one at a time"):
        assert storage.create("claim", b"first")
    assert not storage.create("claim", b"second")
    assert storage.read("claim") == b"first"


def test_a_store_that_lets_only_one_create_is_not_talked_about() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert storage_at(f"memory://{uuid.uuid4().hex}").create("claim", b"first")


def test_what_is_removed_is_gone_and_may_be_gone_already(storage: Storage) -> None:
    storage.put("a/b.bin", b"1")
    storage.put("a/c.bin", b"2")
    storage.remove("a/b.bin")
    storage.remove("a/b.bin")
    assert storage.names("a") == ["c.bin"]
    storage.remove("a")
    storage.remove("a")
    assert storage.names("a") == []


def test_a_write_that_fails_leaves_nothing_to_be_read(tmp_path: Path) -> None:
    class Full(LocalStorage):
        def writing(self, name: str):  # type: ignore[no-untyped-def]  # noqa: ANN202
            (self.path / name).write_bytes(b"ha")
            raise OSError(28, "No space left on device")

    storage = Full(tmp_path)
    (tmp_path / "manifest.json").write_bytes(b"old")
    with pytest.raises(OSError, match="No space left"):
        storage.put("manifest.json", b"half")
    with pytest.raises(OSError, match="No space left"):
        storage.create("claim", b"half")
    assert storage.names() == ["manifest.json"]
    assert storage.read("manifest.json") == b"old"


def test_many_writers_and_a_reader_that_never_sees_half(tmp_path: Path) -> None:
    storage = storage_at(tmp_path)
    contents = [bytes([letter]) * 20_000 for letter in b"abcd"]
    storage.put("file", contents[0])
    done = threading.Event()

    def write() -> None:
        for content in contents * 10:
            storage.put("file", content)
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    while not done.is_set():
        assert storage.read("file") in contents
    writer.join()


def test_addresses(tmp_path: Path) -> None:
    assert isinstance(storage_at(f"file://{tmp_path}"), LocalStorage)
    assert isinstance(storage_at("memory://x"), RemoteStorage)
    with pytest.raises(ConfigError, match="address = nowhere://x: Protocol not known"):
        storage_at("nowhere://x")


# What a rank keeps to itself


def test_own_state_comes_back() -> None:
    state = {"a": [1, 2.5, None, "x"], "b": {"t": torch.arange(4)}}
    back = unpack(pack(state))
    assert back["a"] == state["a"]
    assert torch.equal(back["b"]["t"], torch.arange(4))


def test_what_could_not_be_read_back_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        pack({"fine": {"step": 1}, "hook.0.Ema": {"path": tmp_path}})
    assert str(caught.value) == (
        "state_dict of hook.0.Ema: cannot be saved without pickle; "
        "return only numbers, strings, lists, dicts and tensors"
    )


def test_bytes_that_are_something_else_are_damage() -> None:
    with pytest.raises(DamagedCheckpoint, match="a rank's own state cannot be read"):
        unpack(torch.frombuffer(bytearray(json.dumps({}).encode()), dtype=torch.uint8))
