"""Rules of checkpoints, each by itself: what is refused, in which words, and where limits lie."""

from __future__ import annotations

import errno
import json
import math
import os
import pickle
import socket
import time
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from drivetrain.checkpoint import (
    catalogue,
    companions,
    compare,
    fitting,
    frozen,
    index_check,
    lineage,
)
from drivetrain.checkpoint.access import refusals_named
from drivetrain.checkpoint.compare import Difference, _larger, _numbers, _shown, _values
from drivetrain.checkpoint.contract import Change, Contract, ContractChanged
from drivetrain.checkpoint.failures import RanksFailed, causes, is_of_the_storage, reason, stale
from drivetrain.checkpoint.fitting import check_same_model, check_shapes
from drivetrain.checkpoint.frozen import FrozenBase, check_base, fingerprints
from drivetrain.checkpoint.index_check import merged, read_index
from drivetrain.checkpoint.interval import best_interval
from drivetrain.checkpoint.locate import damaged, locate
from drivetrain.checkpoint.manifest import (
    NAME,
    DamagedCheckpoint,
    File,
    Manifest,
    checksum,
    fingerprint,
    folder_name,
)
from drivetrain.checkpoint.retention import outdated
from drivetrain.checkpoint.storage import LocalStorage
from drivetrain.checkpoint.weight_files import raw_bytes
from drivetrain.config.schema import Checkpoint
from drivetrain.core.errors import (
    ConfigError,
    DamagedRun,
    DrivetrainError,
    EnvironmentProblem,
)

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


# Access


def named(error: Exception) -> str:
    with pytest.raises(EnvironmentProblem) as caught, refusals_named("s3://bucket/run"):
        raise error
    return str(caught.value)


REMEDY = "give a place you may write to, or the credentials for it"


def test_a_refusal_names_the_address_the_reason_and_what_to_do() -> None:
    refused = OSError(errno.EACCES, "Permission denied", "/some/file")
    where = "checkpoint.directory = s3://bucket/run"
    assert named(refused) == f"{where}: Permission denied; {REMEDY}"
    assert (
        named(PermissionError("Access Denied\nrequest 17")) == f"{where}: Access Denied; {REMEDY}"
    )
    assert named(PermissionError()) == f"{where}: PermissionError; {REMEDY}"


@pytest.mark.parametrize(
    "name",
    [
        "NoCredentialsError",
        "PartialCredentialsError",
        "CredentialRetrievalError",
        "TokenRetrievalError",
        "UnauthorizedSSOTokenError",
        "ProfileNotFound",
        "DefaultCredentialsError",
        "RefreshError",
        "ClientAuthenticationError",
    ],
)
def test_stores_without_credentials_are_known_by_the_name_of_their_error(name: str) -> None:
    kind = type(name, (Exception,), {})
    assert ": who are you?; " in named(kind("who are you?"))
    assert ": who are you?; " in named(type("Its", (kind,), {})("who are you?"))


@pytest.mark.parametrize("error", [OSError(errno.EIO, "bad"), ValueError("x"), KeyError("x")])
def test_other_trouble_stays_what_it_is(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, refusals_named("a"):
        raise error
    assert caught.value is error


# Catalogue


def test_a_manifest_that_is_too_large_is_none_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, manifest = written(tmp_path, {"a": torch.ones(2)})
    size = storage.size(f"{manifest.folder}/{NAME}")
    assert size is not None
    monkeypatch.setattr(catalogue, "_MOST_MANIFEST_BYTES", size)
    assert catalogue.read_manifest(storage, manifest.folder) == manifest
    monkeypatch.setattr(catalogue, "_MOST_MANIFEST_BYTES", size - 1)
    with pytest.raises(
        DamagedCheckpoint, match=r"^manifest.json is no file of Drivetrain's \(.+\)"
    ):
        catalogue.read_manifest(storage, manifest.folder)


def test_of_several_strangers_the_first_is_named(tmp_path: Path) -> None:
    storage, manifest = written(tmp_path, {"a": torch.ones(2)})
    for name in ("z.bin", "b.bin"):
        storage.put(f"{manifest.folder}/{name}", b"")
    with pytest.raises(DamagedCheckpoint, match=r"^b\.bin is not in the manifest$"):
        catalogue.verify(storage, manifest.folder)


def test_what_cannot_be_read_is_no_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, manifest = written(tmp_path, {"a": torch.ones(2)})
    read = storage.read

    def fails(name: str, *args: Any, **more: Any) -> bytes:
        if name.endswith(DATA):
            raise OSError(errno.EIO, "Input/output error")
        return read(name, *args, **more)

    monkeypatch.setattr(storage, "read", fails)
    words = r"^cannot be read \(\[Errno 5\] Input/output error\)$"
    with pytest.raises(DamagedCheckpoint, match=words):
        catalogue.verify(storage, manifest.folder)


def test_sizes_are_checked_unless_somebody_has_already(tmp_path: Path) -> None:
    storage, manifest = written(tmp_path, {"a": torch.ones(2)})
    assert [entry.state for entry in catalogue.entries(storage)] == ["good"]
    storage.put(f"{manifest.folder}/{DATA}", b"x" * 1234)
    (entry,) = catalogue.entries(storage)
    assert (entry.state, entry.step, entry.attempt) == ("damaged", 4, 1)
    assert entry.problem == f"{DATA} has 1,234 bytes, not 8"
    assert entry.manifest is None
    (unchecked,) = catalogue.entries(storage, check_sizes=False)
    assert unchecked.manifest == manifest
    assert unchecked.problem == ""


def test_entries_come_newest_first_and_say_why_they_do_not_count(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    lineage.claim_next(storage, 0)
    for step in (4, 12):
        written(tmp_path, {"a": torch.ones(2)}, step=step)
    (tmp_path / folder_name(8, 1)).mkdir()
    lineage.claim_next(storage, 4)
    found = [(entry.step, entry.state, entry.problem) for entry in catalogue.entries(storage)]
    assert found == [
        (12, "replaced", "written by an attempt that had been replaced"),
        (8, "unfinished", "no manifest.json: it was never finished"),
        (4, "good", ""),
    ]


# Companions


def test_a_models_config_and_its_tokenizers_files_are_kept_and_nothing_else(
    tmp_path: Path,
) -> None:
    model, storage = tmp_path / "model", LocalStorage(tmp_path / "run")
    kept = {"config.json": b"{}", "vocab.txt": b"a", "chat.jinja": b"b", "sp.model": b"c"}
    others = ["model.safetensors.index.json", "weights.bin", "code.py", ".hidden.json"]
    model.mkdir()
    for name in (*kept, *others):
        (model / name).write_bytes(kept.get(name, b"{}"))
    (model / "folder.json").mkdir()
    companions.keep(storage, model)
    assert companions.kept(storage) == kept
    for name in others:
        storage.put(f"huggingface/{name}", b"{}")
    assert companions.kept(storage) == kept
    assert companions.kept(LocalStorage(tmp_path / "nowhere")) == {}


def test_more_companions_than_a_run_writes_are_refused(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    for number in range(32):
        storage.put(f"huggingface/{number}.txt", b"")
    assert len(companions.kept(storage)) == 32
    storage.put("huggingface/more.txt", b"")
    with pytest.raises(DamagedRun) as caught:
        companions.kept(storage)
    assert str(caught.value) == f"{tmp_path}/huggingface: 33 files; no run has written them"


def test_companions_that_are_links_or_no_json_are_refused(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "run")
    storage.put("huggingface/config.json", b"{")
    where = f"{tmp_path}/run/huggingface/config.json"
    with pytest.raises(DamagedRun) as caught:
        companions.kept(storage)
    assert str(caught.value).startswith(f"{where}: not JSON (")
    assert str(caught.value).endswith("); remove it")
    (tmp_path / "secret").write_text("{}")
    (tmp_path / "run/huggingface/config.json").unlink()
    (tmp_path / "run/huggingface/config.json").symlink_to(tmp_path / "secret")
    with pytest.raises(DamagedRun) as caught:
        companions.kept(storage)
    assert str(caught.value) == f"{where}: a link, not a file; remove it"
    other = LocalStorage(tmp_path / "other")
    other.path.mkdir()
    (other.path / "huggingface").symlink_to(tmp_path / "run/huggingface")
    with pytest.raises(DamagedRun, match="a link, not a file"):
        companions.kept(other)


def test_a_companion_that_is_too_large_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(companions, "_MOST_BYTES", 3)
    storage = LocalStorage(tmp_path)
    storage.put("huggingface/a.txt", b"123")
    assert companions.kept(storage) == {"a.txt": b"123"}
    storage.put("huggingface/a.txt", b"1234")
    with pytest.raises(DamagedRun):
        companions.kept(storage)


# Compare


def test_two_checkpoints_are_compared_tensor_by_tensor(tmp_path: Path) -> None:
    ours = {
        "model.same": torch.ones(2),
        "model.numbers": torch.tensor([1.0, 2.0, 3.0]),
        "model.shape": torch.ones(2, 3),
        "model.dtype": torch.ones(2),
        "model.here": torch.ones(1),
    }
    theirs = {
        "model.same": torch.ones(2),
        "model.numbers": torch.tensor([1.0, 2.5, 2.0]),
        "model.shape": torch.ones(3, 2),
        "model.dtype": torch.ones(2, dtype=torch.float64),
        "model.there": torch.ones(4, dtype=torch.int64),
    }
    here = written(tmp_path / "here", ours, values={"lr": 0.1})
    there = written(tmp_path / "there", theirs, values={"lr": 0.2})
    found = compare.compare(here, there)
    assert found.differences == (
        Difference("values.lr", "value", "0.1", "0.2"),
        Difference("model.numbers", "numbers", "2 of 3 numbers", "", 1.0),
        Difference("model.shape", "shape", "float32[2, 3]", "float32[3, 2]"),
        Difference("model.dtype", "dtype", "float32[2]", "float64[2]"),
        Difference("model.here", "only here", "float32[1]", "absent"),
        Difference("model.there", "only there", "absent", "int64[4]"),
    )
    assert found.num_identical == 1
    assert not found.is_same
    same = compare.compare(here, here)
    assert same.is_same
    assert same.num_identical == 5


def test_numbers_are_compared_in_parts_to_their_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "_AT_ONCE", 2)
    ours, theirs = torch.zeros(5), torch.tensor([0.0, -3.0, 0.0, 0.0, 2.0])
    assert list(_numbers("a", ours, theirs)) == [
        Difference("a", "numbers", "2 of 5 numbers", "", 3.0)
    ]
    assert list(_numbers("a", ours, ours)) == []


def test_what_is_no_number_and_the_sign_of_zero_are_told_by_their_bits() -> None:
    nan, zero = torch.tensor([math.nan, 1.0]), torch.tensor([0.0])
    assert list(_numbers("a", nan, nan.clone())) == []
    (minus,) = _numbers("a", zero, -zero)
    assert (minus.here, minus.max_abs) == ("1 of 1 numbers", 0.0)
    (lost,) = _numbers("a", nan, torch.tensor([0.0, 9.0]))
    assert lost.max_abs is not None
    assert math.isnan(lost.max_abs), "the largest difference there is"
    (apart,) = _numbers("a", torch.tensor([3j]), torch.tensor([4.0 + 0j]))
    assert apart.max_abs == 5.0


def test_the_larger_difference_wins_and_none_changes_nothing() -> None:
    assert _larger(2.0, torch.tensor([])) == 2.0
    assert _larger(2.0, torch.tensor([1.0, 2.0])) == 2.0
    assert _larger(2.0, torch.tensor([1.0, 3.0])) == 3.0
    assert math.isnan(_larger(2.0, torch.tensor([math.nan])))


def test_values_are_compared_leaf_by_leaf_and_long_lists_as_one() -> None:
    ours = {"a": {"b": [1, {"c": 2}]}, "few": [0] * 32, "many": [0] * 33, "t": torch.ones(3)}
    theirs = {"a": {"b": [1, {"c": 3}]}, "few": [0] * 31 + [1], "many": [0] * 32 + [1], "t": 1}
    found = {each.name: (each.here, each.there) for each in _values(ours, theirs)}
    assert found == {
        "a.b.1.c": ("2", "3"),
        "few.31": ("0", "1"),
        "many": (
            "[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, ...",
            "[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, ...",
        ),
        "t": ("a tensor of 3", "1"),
    }
    assert [each.name for each in _values([1], [1, 2], "x")] == ["x"]
    assert list(_values({"t": torch.ones(1000)}, {"t": torch.ones(1000)})) == []


def test_a_value_is_shown_in_at_most_forty_letters() -> None:
    assert _shown("x" * 40) == "x" * 40
    assert _shown("x" * 41) == "x" * 37 + "..."
    assert _shown(torch.ones(1000)) == "a tensor of 1,000"


# Contract


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (Change("parallel.strategy", "ddp", "fsdp", "said"), "parallel.strategy: ddp → fsdp"),
        (
            Change("precision.tf32", False, True, "said"),
            "precision.tf32: false → true; matrix products round differently from here on",
        ),
        (
            Change("communication.compression", "none", "fp16", "said"),
            "communication.compression: none → fp16; gradients travel differently from here on",
        ),
        (
            Change("model.pretrained", "a", "b", "said"),
            "model.pretrained: a → b; the checkpoint's weights are used",
        ),
        (
            Change("torch", "2.13", "2.14", "said"),
            "torch: 2.13 → 2.14; its kernels may round differently",
        ),
        (
            Change("seed", 1, 2, "accepted"),
            "seed: 1 → 2 (accepted); this epoch's samples may be used twice, or not at all",
        ),
        (
            Change("optimization.learning_rate", 1, 2, "accepted"),
            "optimization.learning_rate: 1 → 2 (accepted)",
        ),
    ],
)
def test_a_change_is_said_with_its_meaning(change: Change, text: str) -> None:
    assert str(change) == text


@pytest.mark.parametrize("key", ["seed", "data.shuffle", "data.length"])
def test_changes_of_the_order_say_so(key: str) -> None:
    assert str(Change(key, 1, 2, "accepted")).endswith("used twice, or not at all")


@pytest.mark.parametrize("key", ["layout", "python", "drivetrain", "torch", "micro_batch_size"])
def test_what_need_not_be_accepted_is_only_said(key: str) -> None:
    (change,) = Contract({key: "new"}).compare("step-4", {key: "old"})
    assert change == Change(key, "old", "new", "said")


@pytest.mark.parametrize(
    ("before", "now", "outcome"),
    [("ddp", "fsdp", "said"), ("ddp", "local_sgd", None), ("ddp", "nobody's", None)],
)
def test_another_strategy_is_fine_unless_it_trains_otherwise(
    before: str, now: str, outcome: str | None
) -> None:
    terms = {"parallel.strategy": now}
    if outcome is None:
        with pytest.raises(ContractChanged):
            Contract(terms).compare("step-4", {"parallel.strategy": before})
        accepted = Contract(terms, frozenset(terms))
        (change,) = accepted.compare("step-4", {"parallel.strategy": before})
        assert change.outcome == "accepted"
    else:
        (change,) = Contract(terms).compare("step-4", {"parallel.strategy": before})
        assert change.outcome == outcome


def test_terms_that_one_side_does_not_know_are_not_compared() -> None:
    contract = Contract({"a": None, "b": 2, "c": 3, "d": 0})
    assert contract.compare("step-4", {"a": 1, "b": None, "e": 5, "d": 0}) == []


def test_data_of_another_length_is_not_also_other_data() -> None:
    now = {"data.length": 10, "data.content": "x"}
    with pytest.raises(ContractChanged) as caught:
        Contract(now).compare("step-4", {"data.length": 9, "data.content": "y"})
    assert [change.key for change in caught.value.changes] == ["data.length"]
    with pytest.raises(ContractChanged) as caught:
        Contract(now).compare("step-4", {"data.length": 10, "data.content": "y"})
    assert [change.key for change in caught.value.changes] == ["data.content"]


def test_checkpoints_that_do_not_say_it_were_trained_with_what_was_then_so() -> None:
    terms = {"optimization.decay_norms_and_biases": False, "scheduler.class": "Mine"}
    with pytest.raises(ContractChanged) as caught:
        Contract(terms).compare("step-4", {"seed": 1})
    assert [(change.key, change.before) for change in caught.value.changes] == [
        ("optimization.decay_norms_and_biases", True),
        ("scheduler.class", "built-in"),
    ]
    assert Contract(terms).compare("step-4", {}) == [], "one without any terms is older still"


def test_a_refusal_comes_from_another_process_as_it_was() -> None:
    with pytest.raises(ContractChanged) as caught:
        Contract({"seed": 2, "torch": "b"}).compare("step-4", {"seed": 1, "torch": "a"})
    back = pickle.loads(pickle.dumps(caught.value))  # noqa: S301 - our own
    assert (back.folder, back.changes, str(back)) == (
        "step-4",
        (Change("seed", 1, 2, "refused"), Change("torch", "a", "b", "said")),
        "seed = 2: was 1 when step-4 was saved; put it back, or add --accept-change seed",
    )


# Failures


def wrapped(*errors: BaseException) -> CheckpointException:
    return CheckpointException("save", {rank: (each, None) for rank, each in enumerate(errors)})  # type: ignore[misc]


def test_the_reason_is_the_ranks_own_in_one_line() -> None:
    assert reason(OSError("no room\nmore")) == "OSError: no room"
    assert reason(ValueError("  \n")) == "ValueError"
    assert reason(RanksFailed("rank 1: no room")) == "rank 1: no room"
    assert reason(wrapped(KeyError("a"))) == "KeyError: 'a'"


def test_what_other_ranks_met_is_found_in_what_torch_makes_of_it() -> None:
    taken = lineage.StaleAttempt("attempt 1 is over")
    error = wrapped(ValueError("x"), taken)
    assert causes(error) == [error, error.failures[0][0], taken]
    assert stale(error) is taken
    assert stale(taken) is taken
    assert stale(wrapped(ValueError("x"))) is None
    assert causes(taken) == [taken]


def test_a_read_that_fails_may_go_through_next_time_unless_the_file_is_gone() -> None:
    assert is_of_the_storage(OSError(errno.EIO, "bad"))
    assert not is_of_the_storage(FileNotFoundError("gone"))
    assert not is_of_the_storage(ValueError("x"))


# Fitting


def test_weights_that_only_one_side_has_are_named_at_most_three() -> None:
    own = {f"model.{letter}" for letter in "abcd"}
    check_same_model("step-4", own, {*own, "optimizer.a.step"})
    with pytest.raises(ConfigError) as caught:
        check_same_model("step-4", own, {"model.x", "model.y", "model.z"})
    remedy = "resume with the model that was saved, or start a new run"
    assert str(caught.value).splitlines() == [
        f"model: checkpoint step-4 has no a, b, c …; {remedy}",
        f"model: this model does not have what checkpoint step-4 has: x, y, z; {remedy}",
    ]


def test_weights_of_other_shapes_are_named_at_most_five() -> None:
    entries = {f"model.{n}": SimpleNamespace(size=torch.Size([2])) for n in range(7)}

    class Reader:
        def read_metadata(self) -> Any:
            return None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fitting, "described", lambda _, name: entries[name])
        reader: Any = Reader()
        check_shapes("step-4", {"model.0": torch.ones(2)}, reader)
        with pytest.raises(ConfigError) as caught:
            check_shapes("step-4", {name: torch.ones(3) for name in entries}, reader)
    lines = str(caught.value).splitlines()
    assert len(lines) == 5
    assert lines[0] == (
        "0 = (3,): checkpoint step-4 has it as (2,); resume with the model that was saved, or "
        "start a new run"
    )


# Frozen weights


def alone(values: list[float]) -> list[float]:
    return values


def test_fingerprints_are_those_of_every_release() -> None:
    """A checkpoint keeps them: another release must come to the same."""
    tensors = {
        "vector": torch.arange(4.0),
        "matrix": torch.arange(6, dtype=torch.int16).view(2, 3),
        "number": torch.tensor(7, dtype=torch.int64),
        "bytes": torch.tensor([[[1]], [[2]]], dtype=torch.uint8),
        "complex": torch.tensor([1 + 2j]),
        "none": torch.ones(0, 3),
    }
    assert fingerprints(tensors, alone) == {
        "vector": "003e441d1a400000",
        "matrix": "75582a6bab7b3585",
        "number": "2304fe9a3c70db8b",
        "bytes": "aba5bf7d7e06f3c7",
        "complex": "35bef7873c800000",
        "none": "0000000000000000",
    }
    assert fingerprints({}, alone) == {}


def test_a_fingerprint_is_of_every_number_and_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.arange(12.0).view(3, 4)
    changed = tensor.clone()
    changed[2, 3] = 0.5
    prints = fingerprints(
        {
            "a": tensor,
            "turned": tensor.flip(0),
            "other way": tensor.flip(1),
            "reshaped": tensor.view(4, 3),
            "changed": changed,
        },
        alone,
    )
    assert len(set(prints.values())) == 5
    monkeypatch.setattr(frozen, "_AT_ONCE", 5)
    assert fingerprints({"a": tensor}, alone)["a"] == prints["a"], "in parts as at once"


def test_copies_of_a_tensor_on_other_ranks_do_not_change_its_fingerprint() -> None:
    tensor = {"a": torch.arange(5.0), "none": torch.ones(0)}
    assert fingerprints(tensor, lambda values: [3 * v for v in values]) == fingerprints(
        tensor, alone
    )


def test_a_base_knows_what_has_moved_on_any_rank() -> None:
    tensors = {"a": torch.ones(3), "b": torch.ones(3), "c": torch.ones(0)}
    base = FrozenBase(tensors, alone)
    assert base.unchanged() == {"a", "b", "c"}
    tensors["b"].data.mul_(2)  # which torch does not count
    assert base.unchanged() == {"a", "c"}
    tensors["a"].add_(0)  # which it does, though no value has changed
    assert base.unchanged() == {"c"}
    elsewhere = FrozenBase({"a": torch.ones(3)}, lambda values: [v + 1 for v in values])
    assert elsewhere.unchanged() == set()
    assert FrozenBase({}, alone).unchanged() == set()


def test_a_bases_fingerprints_are_computed_once() -> None:
    summed: list[int] = []

    def sums(values: list[float]) -> list[float]:
        summed.append(len(values))
        return values

    tensors = {"a": torch.ones(3), "b": torch.ones(3)}
    base = FrozenBase(tensors, sums)
    assert base.fingerprints(["a"]) == {"a": fingerprints({"a": tensors["a"]}, alone)["a"]}
    assert set(base.fingerprints(["a", "b"])) == {"a", "b"}
    assert set(base.fingerprints(["b"])) == {"b"}
    assert summed == [3, 3]


def test_a_base_that_differs_is_named_with_how_many_more() -> None:
    own = {f"model.{letter}": torch.ones(2) for letter in "abc"}
    saved = fingerprints(own, alone)
    check_base("step-4", saved, own, alone)
    check_base("step-4", {**saved, "model.gone": "0"}, own, alone)
    with pytest.raises(ConfigError) as caught:
        check_base("step-4", dict.fromkeys(own, "0"), own, alone)
    assert str(caught.value) == (
        "a: is frozen and not what step-4 was trained on, like 2 more, which has only what was "
        "trained (checkpoint.contents); make the model from the same base weights, or start a new "
        "run"
    )
    with pytest.raises(
        ConfigError, match=r"^b: is frozen and not what step-4 was trained on, which"
    ):
        check_base("step-4", {**saved, "model.b": "0"}, own, alone)


# The index


def entry(*chunks: Any, size: list[int] | None = None, dtype: str = "uint8") -> dict[str, Any]:
    return {"dtype": dtype, "size": size or [4], "chunks": list(chunks)}


def piece(at: int, size: int, start: int | None = None, file: str = "f") -> list[Any]:
    return [[at], [size], file, at if start is None else start, size, "0"]


def test_an_index_is_one_document_or_a_line_for_each_rank() -> None:
    first, second = entry(piece(0, 3)), entry(piece(3, 1))
    whole = {"a": entry(piece(0, 3), piece(3, 1))}
    lines = [json.dumps({"a": each}) for each in (first, second)]
    assert read_index("\n".join(lines).encode(), {"f": 4}) == whole
    assert read_index(json.dumps(whole, indent=1).encode(), {"f": 4}) == whole


def test_pieces_of_one_tensor_must_be_of_one_form() -> None:
    assert merged([{"a": entry(piece(0, 4))}, {"b": entry()}]).keys() == {"a", "b"}
    for other in (entry(size=[5]), entry(dtype="int8")):
        with pytest.raises(ValueError, match="^a has two forms$"):
            merged([{"a": entry()}, {"a": other}])


def test_pieces_may_touch_and_not_overlap() -> None:
    def read(*chunks: Any, size: int = 4) -> None:
        read_index(json.dumps({"a": entry(*chunks)}).encode(), {"f": size, "g": size})

    read(piece(0, 2), piece(2, 2))
    read(piece(0, 2), piece(2, 2), piece(4, 0, 0))
    read(piece(0, 2), piece(2, 2, 0, "g"))
    with pytest.raises(DamagedCheckpoint, match="^index.json lists pieces that overlap in f$"):
        read(piece(0, 2), piece(2, 2, 1))
    with pytest.raises(DamagedCheckpoint, match="^index.json lists pieces of a that overlap$"):
        read(piece(0, 2), piece(1, 2, 2))
    with pytest.raises(DamagedCheckpoint, match="^index.json lists a piece of a outside of it$"):
        read(piece(0, 2), piece(3, 2, 2))
    with pytest.raises(DamagedCheckpoint, match="^index.json lists a piece of a outside of f$"):
        read(piece(0, 4), size=3)
    with pytest.raises(DamagedCheckpoint, match="pieces of a that do not make up the whole$"):
        read(piece(0, 3))
    with pytest.raises(DamagedCheckpoint, match="'h', not a file of this checkpoint$"):
        read(piece(0, 4, 0, "h"))
    without_sum = [*piece(0, 4)[:5], 0]
    with pytest.raises(DamagedCheckpoint, match=r"cannot be read \(a has no checksum\)"):
        read(without_sum)


@pytest.mark.parametrize(
    ("dtype", "itemsize"),
    [
        *(("bool", 1), ("half", 2), ("float", 4), ("double", 8), ("short", 2), ("int", 4)),
        *(("long", 8), ("uint8", 1), ("int16", 2), ("bfloat16", 2), ("float32", 4), ("int64", 8)),
        *(("complex64", 8), ("complex128", 16), ("float8_e4m3fn", 1)),
    ],
)
def test_a_piece_has_as_many_bytes_as_its_numbers_take(dtype: str, itemsize: int) -> None:
    assert index_check._fits(dtype, 3, 3 * itemsize)
    assert not index_check._fits(dtype, 3, 3 * itemsize + 1)
    assert not index_check._fits(dtype, 2, 3 * itemsize)


def test_numbers_of_less_than_a_byte_may_be_packed_and_others_are_no_formats() -> None:
    assert index_check._fits("uint4", 3, 2)
    assert index_check._fits("uint7", 3, 1)
    for dtype in ("quint8", "bits8", "nothing"):
        with pytest.raises(ValueError, match=f"^{dtype} is no number format$"):
            index_check._fits(dtype, 1, 1)
    with pytest.raises(TypeError, match="^5 is no number format$"):
        index_check._fits(5, 1, 1)


@pytest.mark.parametrize(
    ("boxes", "overlap"),
    [
        ([], False),
        ([([0, 0], [2, 2])], False),
        ([([0, 0], [2, 2]), ([0, 2], [2, 2]), ([2, 0], [1, 4])], False),
        ([([0, 0], [2, 2]), ([1, 1], [2, 2])], True),
        ([([0, 0], [4, 1]), ([1, 1], [1, 1]), ([3, 0], [1, 1])], True),
        ([([0, 0], [2, 2]), ([1, 1], [0, 2])], False),
        ([([], []), ([], [])], True),
        ([([0, 0], [3, 1]), ([0, 1], [1, 1]), ([1, 1], [2, 1])], False),
    ],
)
def test_boxes_overlap_where_they_share_a_number(boxes: Any, overlap: bool) -> None:
    assert index_check._overlap(boxes) is overlap


def test_a_shape_is_a_list_of_counts_of_the_right_length() -> None:
    assert index_check._numbers([0, 2], 2) == [0, 2]
    assert index_check._numbers([]) == []
    with pytest.raises(ValueError, match=r"^\[1\] has not 2 dimensions$"):
        index_check._numbers([1], 2)
    for wrong in ((1,), [-1], [True], "1", [1.0]):
        with pytest.raises(ValueError, match="is no shape$"):
            index_check._numbers(wrong)


# Interval


def test_an_interval_is_never_less_than_a_step_and_long_saves_make_it_longer() -> None:
    assert best_interval(1.0, 1e9, 0, 0.0).steps == 1
    assert best_interval(0.0, 1.0, 0, 0.0).steps == round(math.sqrt(2 * 1e-3 * 4 * 3600))
    assert best_interval(1.0, 1.0, 0, 0.0, beside_s=500.0).steps == 1000
    assert best_interval(1e6, 0.0, 0, 0.0).steps == 1800 * 10**6
    assert best_interval(2.0, 0.5, 3, 4 * 3600.0).why == (
        "√(2 × 2000 ms a save × 2.0 h between failures) = 170 s = 339 steps of 500.0 ms "
        "(3 failures in 4.0 h so far)"
    )
    assert "(0 failures in 59 s so far)" in best_interval(1.0, 1.0, 0, 59.0).why
    assert "(0 failures in 1.0 h so far)" in best_interval(1.0, 1.0, 0, 3600.0).why


# Retention


def test_what_is_kept_for_its_score_is_the_first_of_equals() -> None:
    rule = Checkpoint(keep_last=1, keep_best="loss")
    assert outdated([1, 2, 3], rule, {1: 0.5, 2: 0.5}) == [2]
    assert outdated([1, 2, 3], rule, None) == [2, 1]
    assert outdated([1, 2, 3], rule, {}) == [2, 1]
    assert outdated([], rule, {1: 0.5}) == []
    assert outdated([2, 2, 1], Checkpoint(keep_last=2)) == []


# Lineage


def test_a_claim_says_who_when_and_from_where(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    before_s = time.time()
    assert lineage.claim_next(storage, 6, at_least=3) == lineage.Claim(3, 6)
    assert storage.names() == ["attempt-00003.json"]
    facts = json.loads(storage.read("attempt-00003.json"))
    own = facts.pop("self_crc32")
    assert own == fingerprint(facts)
    assert before_s <= facts.pop("time_s") <= time.time()
    assert facts == {"attempt": 3, "resumed_step": 6, "host": socket.gethostname()}
    assert lineage.claim_next(storage, 7) == lineage.Claim(4, 7)
    assert lineage.read_claims(storage) == [lineage.Claim(3, 6), lineage.Claim(4, 7)]
    assert lineage.claim_next(LocalStorage(tmp_path / "new"), 0).attempt == 1


def test_an_attempt_that_was_replaced_is_told_by_whom(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    lineage.check_not_stale(storage, 1)
    lineage.claim_next(storage, 0)
    lineage.claim_next(storage, 0)
    lineage.check_not_stale(storage, 2)
    with pytest.raises(lineage.StaleAttempt) as caught:
        lineage.check_not_stale(storage, 1)
    assert str(caught.value) == (
        "attempt 1 is over: attempt 2 has taken over this run; nothing more was written"
    )
    assert caught.value.exit_code == 77


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        (b"{}", "it is no claim (2 bytes)"),
        (b"[1]", "it is no claim (3 bytes)"),
        (b'{"resumed_step": 0, "attempt": 1}', "its checksum is missing"),
        (b'{"resumed_step": 0, "self_crc32": "x"}', "it does not match its own checksum"),
        (b'{"resumed_step": -1}', "it resumes from step -1"),
        (b'{"resumed_step": true}', "it resumes from step True"),
    ],
)
def test_why_a_claim_cannot_be_read(tmp_path: Path, facts: bytes, why: str) -> None:
    storage = LocalStorage(tmp_path)
    storage.put("attempt-00001.json", facts)
    with pytest.raises(EnvironmentProblem) as caught:
        lineage.read_claims(storage)
    assert str(caught.value) == (
        f"{tmp_path}/attempt-00001.json: the claim of attempt 1 cannot be read ({why}), so which "
        "checkpoints count is unknown, and nothing was touched; if no other attempt of this run "
        "is alive, delete this file to resume from the newest checkpoint"
    )


def test_a_claim_under_anothers_name_is_not_read(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    facts = {"attempt": 2, "resumed_step": 0}
    text = json.dumps({**facts, "self_crc32": fingerprint(facts)}).encode()
    storage.put("attempt-00001.json", text)
    with pytest.raises(EnvironmentProblem, match=r"\(it is attempt 2's\)"):
        lineage.read_claims(storage)
    storage.remove("attempt-00001.json")
    storage.put("attempt-00002.json", text)
    storage.put("attempt-x.json", b"no claim at all")
    assert lineage.read_claims(storage) == [lineage.Claim(2, 0)]
    first = b'{"resumed_step": 0, "host": "h", "time_s": 1.0}'  # before claims had checksums
    storage.put("attempt-00001.json", first)
    assert lineage.claimed(storage) == [1, 2]
    assert lineage.read_claims(storage)[0] == lineage.Claim(1, 0)


# Locate


def test_checkpoints_are_found_wherever_one_points(tmp_path: Path) -> None:
    run = tmp_path / "run"
    _, manifest = written(run / "checkpoints", {"a": torch.ones(1)}, step=4)
    written(run / "checkpoints", {"a": torch.ones(1)}, step=8)
    for address in (run, run / "checkpoints", f"{run}/"):
        found = locate(str(address))
        assert found.storage.address == str(run / "checkpoints")
        assert found.folder is None
        assert [each.step for each in found.entries()] == [8, 4]
        assert found.choose().step == 8
        assert found.choose(4).step == 4
    for address in (run / "checkpoints" / manifest.folder, f"{run}/checkpoints/{manifest.folder}/"):
        one = locate(str(address))
        assert one.folder == manifest.folder
        assert [each.step for each in one.entries()] == [4]
        assert one.choose().step == 4
    config = {"config": {"checkpoint": {"directory": str(run / "checkpoints")}}}
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/run.yaml").write_text(json.dumps(config))
    assert locate(str(tmp_path / "elsewhere")).storage.address == str(run / "checkpoints")


def test_a_checkpoint_of_the_working_directory_is_found_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, manifest = written(tmp_path, {"a": torch.ones(1)})
    monkeypatch.chdir(tmp_path)
    found = locate(manifest.folder)
    assert (found.storage.address, found.folder) == (str(tmp_path), manifest.folder)


def test_where_there_are_none_it_is_said_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        locate(str(tmp_path)[-20:])
    assert str(caught.value) == (
        f"checkpoints = {str(tmp_path)[-20:]}: there are none; give a run's directory, a folder of "
        "checkpoints, one checkpoint, or an address like s3://bucket/run"
    )
    (tmp_path / "run.yaml").write_text('{"config": {"checkpoint": {"directory": null}}}')
    with pytest.raises(ConfigError, match="there are none"):
        locate(str(tmp_path))
    (tmp_path / "run.yaml").write_text("config: 5")
    with pytest.raises(DamagedRun) as broken:
        locate(str(tmp_path))
    assert str(broken.value).startswith(f"{tmp_path}/run.yaml: names no folder of checkpoints (")


def test_a_step_that_is_not_there_is_answered_with_those_that_are(tmp_path: Path) -> None:
    for step in (8, 4):
        written(tmp_path, {"a": torch.ones(1)}, step=step)
    with pytest.raises(ConfigError) as caught:
        locate(str(tmp_path)).choose(6)
    assert str(caught.value) == (
        f"--step = 6: {tmp_path} has no checkpoint of this step; choose one of 4, 8"
    )
    assert str(damaged("step-4", "x is missing")) == (
        "step-4: x is missing; `drivetrain checkpoint verify` finds the good ones, --step chooses "
        "one"
    )


def test_the_newest_good_one_is_chosen_and_of_none_the_newest_is_named(tmp_path: Path) -> None:
    written(tmp_path, {"a": torch.ones(1)}, step=4)
    storage, newest = written(tmp_path, {"a": torch.ones(1)}, step=8)
    storage.put(f"{newest.folder}/{DATA}", b"")
    assert locate(str(tmp_path)).choose().step == 4
    with pytest.raises(DrivetrainError, match=f"^{newest.folder}: {DATA} has 0 bytes, not 4; "):
        locate(str(tmp_path)).choose(8)


@pytest.mark.parametrize(
    "values", [{}, {"common": {"run": {"value": 5}}}, {"common": {"run": {"value": {}}}}]
)
def test_the_best_step_is_what_the_newest_checkpoint_says(
    tmp_path: Path, values: dict[str, Any]
) -> None:
    known = {"common": {"run": {"value": {"best_step": 4}}}}
    written(tmp_path / "known", {"a": torch.ones(1)}, step=8, values=known)
    assert locate(str(tmp_path / "known")).best_step() == 4
    written(tmp_path / "not", {"a": torch.ones(1)}, step=8, values=values)
    with pytest.raises(ConfigError) as caught:
        locate(str(tmp_path / "not")).best_step()
    assert str(caught.value) == (
        f"--best: no evaluation of {tmp_path}/not was marked as best; train with "
        "checkpoint.keep_best, or give --step"
    )


# Manifest


def changed(**changes: Any) -> bytes:
    body = json.loads(Manifest(4, 1, {"dp": 2}, "ddp", {}).to_json())
    del body["self_crc32"]
    body |= changes
    return json.dumps({**body, "self_crc32": fingerprint(body)}).encode()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("step", -1), ("step", 1.0), ("step", True), ("attempt", -1), ("attempt", "1")),
        *(("layout", []), ("layout", {"dp": -1}), ("strategy", None), ("position", [])),
        *(("contents", "all"), ("values", []), ("contract", None), ("versions", "1")),
        *(("created_s", -1), ("created_s", 1e11), ("created_s", "1"), ("created_s", None)),
        ("files", [{"name": "a/b", "size": 1, "crc32": "00000000"}]),
        ("files", [{"name": ".a", "size": 1, "crc32": "00000000"}]),
        ("files", [{"name": 5, "size": 1, "crc32": "00000000"}]),
        ("files", [{"name": "a", "size": -1, "crc32": "00000000"}]),
        ("files", [{"name": "a", "size": 1, "crc32": "0000000"}]),
        ("files", [{"name": "a", "size": 1, "crc32": 12345678}]),
    ],
)
def test_what_is_not_of_its_kind_is_named(key: str, value: Any) -> None:
    with pytest.raises(DamagedCheckpoint) as caught:
        Manifest.from_json(changed(**{key: value}))
    assert str(caught.value) == (
        f"manifest.json lacks what it must have ({key} is not of its kind)"
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("step", 0), ("attempt", 0), ("layout", {}), ("contents", "everything")),
        *(("contents", "trained"), ("contents", "weights"), ("created_s", 0)),
        *(("created_s", 9.9e10), ("files", [{"name": "a-1.b_c", "size": 0, "crc32": "00000000"}])),
    ],
)
def test_what_is_of_its_kind_is_read(key: str, value: Any) -> None:
    found = getattr(Manifest.from_json(changed(**{key: value})), key)
    assert found == ((File("a-1.b_c", 0, "00000000"),) if key == "files" else value)


def test_a_manifest_of_another_format_or_without_its_checksum_is_refused() -> None:
    with pytest.raises(
        DamagedCheckpoint, match="^manifest.json has format 2; this release reads 1$"
    ):
        Manifest.from_json(changed(format=2))
    body = json.loads(changed())
    del body["self_crc32"]
    with pytest.raises(DamagedCheckpoint, match=r"^manifest.json cannot be read \('self_crc32'\)$"):
        Manifest.from_json(json.dumps(body).encode())
    with pytest.raises(DamagedCheckpoint, match="^manifest.json does not match its own checksum$"):
        Manifest.from_json(json.dumps({**body, "self_crc32": "00000000"}).encode())
    for wrong in (b"{", b"[]", b"5"):
        with pytest.raises(DamagedCheckpoint, match="^manifest.json cannot be read"):
            Manifest.from_json(wrong)
    with pytest.raises(DamagedCheckpoint, match="lacks what it must have"):
        Manifest.from_json(changed(more=1))


def test_a_manifest_is_written_for_people_too_and_begins_with_its_format() -> None:
    text = Manifest(4, 1, {"dp": 2}, "ddp", {}).to_json().decode()
    assert text.startswith('{\n "format": 1,\n "step": 4,\n "attempt": 1,\n')
    assert list(json.loads(text))[-1] == "self_crc32"


def test_checksums_are_eight_digits_whatever_the_order_of_keys() -> None:
    assert checksum(b"") == "00000000"
    assert checksum(b"abc") == f"{zlib.crc32(b'abc'):08x}" == "352441c2"
    assert (
        fingerprint({"a": 1, "b": 2})
        == fingerprint({"b": 2, "a": 1})
        == checksum(b'{"a": 1, "b": 2}')
    )
    assert folder_name(4, 12) == "step-000000004-a12"
    assert os.path.basename(folder_name(1234567890, 1)) == "step-1234567890-a1"
