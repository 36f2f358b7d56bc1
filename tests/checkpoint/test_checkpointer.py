"""Checkpointer: saves, failures, retention and resuming in one process."""

from __future__ import annotations

import errno
import pickle
import time
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain import __version__
from drivetrain.checkpoint import checkpointer as checkpointer_module
from drivetrain.checkpoint import lineage
from drivetrain.checkpoint.catalogue import read_manifest
from drivetrain.checkpoint.checkpointer import Checkpointer, Saved, versions
from drivetrain.checkpoint.compare import compare
from drivetrain.checkpoint.contract import Contract
from drivetrain.checkpoint.frozen import FrozenBase
from drivetrain.checkpoint.manifest import NAME, DamagedCheckpoint, folder_name
from drivetrain.checkpoint.pins import pin
from drivetrain.checkpoint.sharing import Held, Sharing
from drivetrain.checkpoint.state import TrainingState, pack
from drivetrain.checkpoint.storage import LocalStorage, storage_at
from drivetrain.checkpoint.whole_tensors import WholeTensors
from drivetrain.config.schema import Checkpoint
from drivetrain.core.errors import ConfigError, EnvironmentProblem, NotSaved
from tests.checkpoint.parts import DATA, Small, Thing, run_state, saved, trained, world, written


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
    words = "^it holds weights only, so a run cannot resume from it exactly$"
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
    manifest = saver.load_newest(run_state())
    assert manifest is not None
    assert manifest.step == 4
    assert list(saver.skipped) == [folder_name(8, 1), folder_name(6, 1)]
    saver.storage.remove(folder_name(4, 1))
    with pytest.raises(EnvironmentProblem) as caught:
        saver.load_newest(run_state())
    bad = ", ".join(f"{name} ({problem})" for name, problem in saver.skipped.items())
    assert str(caught.value).startswith("checkpoints = ")
    assert f"no checkpoint is good: {bad}; remove them" in str(caught.value)


def test_without_any_checkpoint_nothing_is_loaded(saver: Checkpointer) -> None:
    assert saver.load_newest(run_state()) is None
    (Path(saver.storage.address) / folder_name(2, 1)).mkdir()
    assert saver.load_newest(run_state()) is None
    assert saver.skipped == {folder_name(2, 1): "no manifest.json: the save did not finish"}


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
        f"cannot write to {tmp_path} (OSError: [Errno {code}] No room), so no step of this "
        "attempt could be saved; free some space or make the directory writable, then run the "
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
    with pytest.raises(DamagedCheckpoint, match="^another rank found it damaged$"):
        saver._together(lambda: 5)
    assert told == [[0.0]]
    saver._world = world()


def test_fingerprints_that_are_none_are_damage(saver: Checkpointer) -> None:
    saved(saver, 4)
    saver.amend(4, lambda values: {**values, "frozen": [1]})
    words = "^its fingerprints of frozen weights are not a mapping$"
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
    words = f"^frozen: is frozen and differs from the base weights of {manifest.folder}"
    with pytest.raises(ConfigError, match=words):
        saver.load(state(changed, optimizer), manifest.folder)


def test_a_model_that_is_another_is_refused_before_anything_is_read(saver: Checkpointer) -> None:
    saved(saver, 4)
    model = nn.Linear(2, 2)
    before = model.weight.clone()
    with pytest.raises(ConfigError, match=f"^model: checkpoint {folder_name(4, 1)} has no bias, w"):
        saver.load(TrainingState(model, None), folder_name(4, 1))
    wide = Small()
    wide.linear = nn.Linear(2, 3)
    words = r"^linear\.weight = \(3, 2\): checkpoint .* has shape \(2, 2\)"
    with pytest.raises(ConfigError, match=words):
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
