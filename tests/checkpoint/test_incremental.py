"""Incremental saves: what is written, what is referred to, and what becomes of files that are."""

from __future__ import annotations

import itertools
import json
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from drivetrain.checkpoint import catalogue, lineage, pins
from drivetrain.checkpoint.checkpointer import Checkpointer, Saved
from drivetrain.checkpoint.compare import compare
from drivetrain.checkpoint.export import export_weights
from drivetrain.checkpoint.locate import locate
from drivetrain.checkpoint.manifest import (
    NAME,
    DamagedCheckpoint,
    Manifest,
    Reference,
    checksum,
    fingerprint,
    folder_name,
)
from drivetrain.checkpoint.state import TrainingState
from drivetrain.checkpoint.storage import LocalStorage, RemoteStorage, Storage, storage_at
from drivetrain.checkpoint.tensor_index import Piece
from drivetrain.checkpoint.unchanged import Base, Form, Unchanged, references
from drivetrain.checkpoint.whole_tensors import WholeTensors
from drivetrain.cli.checkpoint import _as_dict, _cells
from drivetrain.config.schema import Checkpoint
from drivetrain.core.errors import EnvironmentProblem
from drivetrain.core.text import readable_bytes
from drivetrain.train.task import Task
from drivetrain.train.trainer import Trainer
from tests.checkpoint.parts import DATA, Thing, world

APART = "data-00000-unchanged.bin"
BASE_BYTES = 64 * 64 * 4


class Adapted(nn.Module):
    """A frozen base, and something small that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(64, 64, bias=False).requires_grad_(False)
        self.adapter = nn.Linear(2, 2)


class Run:
    """A training of an adapter in one process; every step changes what is trained."""

    def __init__(self, storage: Storage, **rule: Any) -> None:
        torch.manual_seed(3)
        self.model = Adapted()
        self.optimizer = torch.optim.AdamW(self.model.adapter.parameters(), lr=0.1)
        self.state = TrainingState(
            self.model, self.optimizer, common={"run": Thing(1)}, own={"mine": Thing(1)}
        )
        settings = Checkpoint(**{"keep_last": 2, "incremental": True, **rule})
        self.saver = Checkpointer(storage, settings, world(), "ddp")
        loaded = self.saver.load_newest(self.state)
        self.saver.claim(0 if loaded is None else loaded.step)

    def train(self) -> None:
        torch.rand(1)  # the rank's own random state changes, too
        self.model.adapter(torch.ones(1, 2)).sum().backward()
        self.optimizer.step()

    def save(self, step: int) -> Saved:
        self.train()
        self.saver.save(self.state, step, {"step": step})
        done = self.saver.wait()
        assert done is not None
        assert done.problem == ""
        return done

    def manifest(self, step: int) -> Manifest:
        return catalogue.read_manifest(self.saver.storage, folder_name(step, self.saver.attempt))


@pytest.fixture(params=["local", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    """A folder of this machine, and an object store of fsspec's."""
    if request.param == "local":
        return LocalStorage(tmp_path)
    return RemoteStorage(f"memory://{uuid.uuid4().hex}/checkpoints")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(LocalStorage(tmp_path / "checkpoints"))
    yield made
    made.saver.close()


def everything(storage: Storage, manifest: Manifest) -> dict[str, torch.Tensor]:
    found = WholeTensors(storage, manifest)
    return {name: found.read(name) for name in found.names()}


def chunks(storage: Storage, manifest: Manifest) -> dict[str, Any]:
    index = json.loads(storage.read(f"{manifest.folder}/index.json"))
    return {name: entry["chunks"][0] for name, entry in index.items()}


# What is written.


@pytest.mark.filterwarnings("ignore:.*cannot create .* only if")
def test_only_what_has_changed_is_written(storage: Storage) -> None:
    run = Run(storage)
    first, second, third = (run.save(step) for step in (2, 4, 6))
    assert first.referred_bytes == 0
    assert first.written_bytes is not None
    assert first.written_bytes > BASE_BYTES
    for each in (second, third):
        assert each.referred_bytes == BASE_BYTES
        assert each.written_bytes is not None
        assert each.written_bytes < first.written_bytes - BASE_BYTES + 200
    manifest = run.manifest(6)
    assert manifest.num_bytes == third.written_bytes, "as its files are"
    file = f"{folder_name(2, 1)}/{DATA}"
    size = storage.size(file)
    assert manifest.referred == (Reference(file, size or 0, BASE_BYTES),), "the file itself"
    found = chunks(storage, manifest)
    assert found["model.base.weight"][2] == file
    others = {name: chunk[2] for name, chunk in found.items() if name != "model.base.weight"}
    assert set(others.values()) == {DATA}
    assert {"model.adapter.weight", "optimizer.adapter.weight.exp_avg"} <= others.keys()
    assert catalogue.verify(storage, manifest.folder) == manifest
    whole = everything(storage, manifest)
    for name, tensor in run.state.load_targets().items():
        assert torch.equal(tensor, whole[name]), name


def test_a_frozen_weight_that_a_hook_changes_is_written_again(run: Run) -> None:
    run.save(2)
    with torch.no_grad():
        run.model.base.weight.data[5, 7] += 1  # which torch does not count
    assert run.save(4).referred_bytes == 0
    assert run.save(6).referred_bytes == BASE_BYTES
    (only,) = run.manifest(6).referred or ()
    assert only.name == f"{folder_name(4, 1)}/{DATA}"
    assert everything(run.saver.storage, run.manifest(6))["model.base.weight"].equal(
        run.model.base.weight
    )


def test_bits_decide_and_not_numbers(run: Run) -> None:
    """NaN is not equal to itself, and zero to minus zero; as bytes it is the other way round."""
    with torch.no_grad():
        run.model.base.weight.fill_(float("nan"))
        run.model.base.weight[0, 0] = 0.0
    run.save(2)
    assert run.save(4).referred_bytes == BASE_BYTES
    with torch.no_grad():
        run.model.base.weight[0, 0] = -0.0
    assert run.save(6).referred_bytes == 0
    found = everything(run.saver.storage, run.manifest(4))["model.base.weight"]
    assert bool(found[1:].isnan().all())


def test_checkpoints_without_it_are_what_they_were_and_none_is_referred_to(tmp_path: Path) -> None:
    run = Run(LocalStorage(tmp_path), incremental=False)
    for step in (2, 4):
        assert run.save(step).referred_bytes == 0
    body = json.loads((tmp_path / folder_name(4, 1) / NAME).read_bytes())
    assert body["format"] == 1
    assert "referred" not in body
    assert {len(chunk) for chunk in chunks(run.saver.storage, run.manifest(4)).values()} == {6}
    after = Run(LocalStorage(tmp_path))
    assert after.save(6).referred_bytes == 0, "there are no digests to compare with"
    assert after.save(8).referred_bytes == BASE_BYTES


def test_a_release_before_references_refuses_them(run: Run) -> None:
    run.save(2)
    body = json.loads(run.saver.storage.read(f"{folder_name(2, 1)}/{NAME}"))
    assert body["format"] == 2, "also the first: its index has digests"


def test_saves_beside_the_steps_refer_to_the_one_before(run: Run) -> None:
    done = []
    for step in (2, 4, 6):
        run.train()
        done.append(run.saver.save(run.state, step, {"step": step}))
    done.append(run.saver.wait())
    assert [None if each is None else each.referred_bytes for each in done] == [
        *(None, 0, BASE_BYTES, BASE_BYTES)
    ]


def test_a_save_that_failed_is_not_referred_to(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.save(2)

    def full(name: str, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    with torch.no_grad():
        run.model.base.weight.fill_(3)
    with monkeypatch.context() as patch:
        patch.setattr(run.saver.storage, "put", full)
        run.saver.save(run.state, 4, {"step": 4})
        failed = run.saver.wait()
    assert failed is not None
    assert failed.problem
    assert failed.written_bytes is None
    assert run.save(6).referred_bytes == 0
    assert catalogue.verify(run.saver.storage, folder_name(6, 1)).step == 6


def test_a_step_that_is_saved_again_does_not_refer_to_itself(run: Run) -> None:
    run.save(2)
    run.save(4)
    run.saver.save(run.state, 4, {"step": 4})  # nothing has changed since
    run.saver.wait()
    manifest = catalogue.verify(run.saver.storage, folder_name(4, 1))
    assert manifest.num_referred_bytes == BASE_BYTES
    found = everything(run.saver.storage, manifest)
    assert torch.equal(found["model.adapter.weight"], run.model.adapter.weight)


def test_a_rank_of_which_nothing_has_changed_writes_no_file(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    saver = Checkpointer(storage, Checkpoint(incremental=True), world(), "ddp")
    saver.claim(0)
    state = TrainingState(Adapted(), None)
    for step in (2, 4):
        saver.save(state, step, {}, contents="weights")
        saver.wait()
    assert storage.names(folder_name(4, 1)) == ["index.json", NAME]
    assert catalogue.verify(storage, folder_name(4, 1)).num_referred_bytes > BASE_BYTES


def test_a_file_is_not_kept_for_a_small_part_of_it() -> None:
    def known(name: str, length: int, file: str, digest: str = "d") -> tuple[Form, Piece]:
        return Form(name, (0,), (length,), "uint8"), Piece(file, 0, length, "0", digest)

    pieces = dict(
        [
            known("half", 5, "a"),
            known("less", 4, "b"),
            known("moved", 5, "a"),
            known("gone", 9, "c"),
        ]
    )
    base = Base(pieces, {"a": 10, "b": 9, "c": 9})

    class Store:
        def size(self, name: str) -> int | None:
            return {"a": 10, "b": 9}.get(name)

    store: Any = Store()
    asked = [(form, "e" if form.name == "moved" else "d") for form in pieces]
    asked += [(Form("half", (0,), (5,), "int8"), "d"), (Form("half", (1,), (5,), "uint8"), "d")]
    found, apart = Unchanged(store, base, "step").found(asked)
    assert {number: piece.file for number, piece in found.items()} == {0: "a"}
    assert apart == [1, 3], "too little of its file, and a file that is gone"
    assert references([("b", 9, 4), ("a", 9, 1), ("b", 9, 2)]) == (
        Reference("a", 9, 1),
        Reference("b", 9, 6),
    )


def test_what_seldom_changes_moves_to_a_file_of_its_own(run: Run) -> None:
    """So that a run that trains nearly all does not keep its first checkpoint for a buffer."""
    run.model.base.requires_grad_(True)
    run.model.register_buffer("mask", torch.ones(100))
    run.optimizer.add_param_group({"params": [run.model.base.weight]})

    def save(step: int) -> Saved:
        run.model.base(torch.ones(1, 64)).sum().backward()
        return run.save(step)

    assert save(2).referred_bytes == 0
    assert save(4).referred_bytes == 0
    assert (Path(run.saver.storage.address) / folder_name(4, 1) / APART).stat().st_size == 400
    assert save(6).referred_bytes == 400
    save(8)
    found = {entry.folder: entry.state for entry in catalogue.entries(run.saver.storage)}
    assert found == {
        folder_name(8, 1): "good",
        folder_name(6, 1): "good",
        folder_name(4, 1): "base",
    }
    assert run.saver.storage.names(folder_name(4, 1)) == [APART]
    for step in (6, 8):
        assert catalogue.verify(run.saver.storage, folder_name(step, 1)).step == step


def test_a_run_says_what_its_saves_come_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        found: torch.Tensor = model.get_submodule("adapter")(batch[0]).sum()
        return found

    config = {
        "global_batch_size": 2,
        "max_steps": 6,
        "output_dir": str(tmp_path),
        "record": {"progress": "plain", "sinks": []},
        "checkpoint": {"every_steps": 2, "incremental": True, "asynchronous": False},
    }
    trainer = Trainer(Task(Adapted, loss), config)
    trainer.fit(TensorDataset(torch.ones(12, 2)))
    said = [line for line in capsys.readouterr().out.splitlines() if "had not changed" in line]
    assert trainer.run_dir is not None
    second = next(e for e in locate(str(trainer.run_dir)).entries() if e.step == 4).manifest
    assert second is not None
    assert said == [
        f"checkpoints: step 4 wrote {readable_bytes(second.num_bytes)}; "
        f"{readable_bytes(second.num_referred_bytes)} had not changed and stay in earlier ones"
    ]
    assert second.num_referred_bytes >= BASE_BYTES


# Resuming.


def test_an_attempt_that_resumes_refers_to_what_it_has_loaded(run: Run) -> None:
    for step in (2, 4):
        run.save(step)
    run.saver.close()
    after = Run(run.saver.storage)
    for name, tensor in run.state.load_targets().items():
        assert torch.equal(tensor, after.state.load_targets()[name]), name
    assert after.save(6).referred_bytes == BASE_BYTES
    (only,) = after.manifest(6).referred or ()
    assert only.name == f"{folder_name(2, 1)}/{DATA}", "no chain"


def test_other_runs_are_not_referred_to(run: Run, tmp_path: Path) -> None:
    run.save(2)
    other = Run(LocalStorage(tmp_path / "other"))
    there = other.saver.elsewhere(run.saver.storage)
    there.load(other.state, folder_name(2, 1))
    done = other.save(4)
    assert done.referred_bytes == 0
    pieces = other.saver.elsewhere(LocalStorage(tmp_path / "pieces"))
    pieces.save(other.state, 4, {}, contents="weights")
    pieces.wait()
    (manifest,) = pieces.good()
    assert manifest.referred is None, "what is written elsewhere stands alone"


# Retention.


def test_a_file_stays_while_a_checkpoint_refers_to_it_and_no_longer(run: Run) -> None:
    storage = run.saver.storage
    for step in (2, 4, 6, 8):
        run.save(step)
    listed = {entry.folder: entry.state for entry in catalogue.entries(storage)}
    assert listed == {
        folder_name(8, 1): "good",
        folder_name(6, 1): "good",
        folder_name(2, 1): "base",
    }
    assert storage.names(folder_name(2, 1)) == [DATA]
    with pytest.raises(DamagedCheckpoint):
        run.saver.load(run.state, folder_name(2, 1))
    assert run.saver._next_folder({}) == folder_name(8, 1)
    tried = {folder_name(8, 1): "", folder_name(6, 1): ""}
    assert run.saver._next_folder(tried) == ""
    assert run.saver.skipped == {}, "and not a word about what is none"
    for step in (6, 8):
        assert catalogue.verify(storage, folder_name(step, 1)).step == step
    with torch.no_grad():
        run.model.base.weight.fill_(5)
    run.save(10)
    assert storage.names(folder_name(2, 1)) == [DATA], "8 still refers to it"
    run.save(12)
    assert [name for name in storage.names() if name.startswith("step-")] == [
        folder_name(10, 1),
        folder_name(12, 1),
    ]


def test_what_is_pinned_or_best_keeps_what_it_refers_to(tmp_path: Path) -> None:
    run = Run(LocalStorage(tmp_path), keep_last=1, keep_best="loss")
    run.saver.scores = {6: 0.5}
    storage = run.saver.storage
    run.save(2)
    run.save(4)
    pins.pin(storage, folder_name(4, 1), "another")
    run.save(6)
    with torch.no_grad():
        run.model.base.weight.fill_(5)
    run.save(8)
    run.save(10)
    assert [each.step for each in run.saver.good()] == [10, 6, 4]
    for step in (4, 6, 10):
        assert catalogue.verify(storage, folder_name(step, 1)).step == step
    pins.release(storage, folder_name(4, 1), "another")
    run.saver.scores = {10: 0.1}
    run.save(12)
    folders = {entry.folder: entry.state for entry in catalogue.entries(storage)}
    assert folders == {
        folder_name(12, 1): "good",
        folder_name(10, 1): "good",
        folder_name(8, 1): "base",
    }


def test_what_is_pinned_may_be_the_only_one_that_refers_to_a_file(tmp_path: Path) -> None:
    run = Run(LocalStorage(tmp_path), keep_last=1)
    run.save(2)
    run.save(4)
    pins.pin(run.saver.storage, folder_name(4, 1), "another")
    with torch.no_grad():
        run.model.base.weight.fill_(5)
    run.save(6)
    assert catalogue.verify(run.saver.storage, folder_name(4, 1)).num_referred_bytes == BASE_BYTES


def test_a_new_attempt_clears_nothing_that_is_referred_to(run: Run) -> None:
    storage = run.saver.storage
    for step in (2, 4, 6):
        run.save(step)
    assert run.saver._rule.keep_last == 2
    (Path(storage.address) / folder_name(7, 1)).mkdir()
    run.saver.attempt = lineage.claim_next(storage, 6).attempt
    run.saver.clean()
    assert folder_name(7, 1) not in storage.names()
    assert storage.names(folder_name(2, 1)) == [DATA]
    assert catalogue.verify(storage, folder_name(6, 1)).step == 6


class Killed(BaseException):
    """Not an Exception: nothing that catches those goes on."""


class Dying(LocalStorage):
    """The process is gone before its n-th change."""

    left = 1_000_000

    def _change(self) -> None:
        type(self).left -= 1
        if type(self).left < 0:
            raise Killed

    def put(self, name: str, data: bytes) -> None:
        self._change()
        super().put(name, data)

    def writing(self, name: str) -> Any:
        self._change()
        return super().writing(name)

    def remove(self, name: str) -> None:
        self._change()
        super().remove(name)


@pytest.mark.parametrize(
    ("earlier", "base_changes", "num_changes"),
    [((2,), False, 6), ((2, 4), True, 8)],
    ids=["a base is made", "a base goes"],
)
def test_a_kill_between_any_two_changes_leaves_every_checkpoint_whole(
    tmp_path: Path, earlier: tuple[int, ...], base_changes: bool, num_changes: int
) -> None:
    """Killed in the save of step 6: before its first change, its second, and so on to its end."""
    for number in itertools.count():
        root = tmp_path / str(number)
        Dying.left = 1_000_000
        run = Run(Dying(root), keep_last=1)
        for step in earlier:
            run.save(step)
        if base_changes:  # nothing refers to the first any more
            run.model.base.weight.data.fill_(number)
        run.train()
        Dying.left = number
        with suppress(Killed):
            run.saver.save(run.state, 6, {"step": 6})
            run.saver.wait()
        has_ended = Dying.left >= 0
        place = LocalStorage(root)
        good = [entry.folder for entry in catalogue.entries(place) if entry.manifest]
        assert good, number
        for folder in good:
            catalogue.verify(place, folder)
        after = Run(place, keep_last=1)
        after.saver.clean()
        after.save(8)
        states = [entry.state for entry in catalogue.entries(place)]
        assert states == ["good", "base"], "nothing else is left behind"
        assert catalogue.verify(place, folder_name(8, after.saver.attempt)).referred
        if has_ended:
            break
    assert number == num_changes


# Reading.


def test_the_verbs_read_through_references(run: Run, tmp_path: Path) -> None:
    storage = run.saver.storage
    for step in (2, 4):
        run.save(step)
    manifest = run.manifest(4)
    export_weights(storage, manifest, tmp_path / "weights.pt")
    exported = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert torch.equal(exported["base.weight"], run.model.base.weight)
    found = compare((storage, run.manifest(2)), (storage, manifest))
    assert "model.base.weight" not in {each.name for each in found.differences}
    entry, _ = catalogue.entries(storage)
    assert _cells(entry)[-1] == "ddp one rank, + 16.0 KiB in earlier ones"
    shown = _as_dict(entry)
    assert shown["bytes"] == manifest.num_bytes
    assert shown["referred_bytes"] == BASE_BYTES
    assert shown["refers_to"] == [f"{folder_name(2, 1)}/{DATA}"]


def _put_back(place: str) -> str:
    return (
        f"^{folder_name(2, 1)}/{DATA} {place}; this checkpoint stores bytes in that file "
        r"\(checkpoint.incremental\): restore it, or use a checkpoint that does not refer to it$"
    )


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)


def _link(path: Path) -> None:
    path.rename(path.parent.parent / "elsewhere.bin")
    path.symlink_to(path.parent.parent / "elsewhere.bin")


def _link_folder(path: Path) -> None:
    path.parent.rename(path.parent.parent / "elsewhere")
    path.parent.symlink_to(path.parent.parent / "elsewhere")


@pytest.mark.parametrize(
    ("damage", "listed", "read"),
    [
        (Path.unlink, "is missing", "is missing"),
        (_link, "is a link, not a file", "is a link, not a file"),
        (_link_folder, "is a link, not a file", "is a link, not a file"),
        (lambda path: path.write_bytes(b"12"), "has 2 bytes, not .*", "is damaged at .*"),
        (_flip, "", "is damaged at model.base.weight"),
    ],
)
def test_a_damaged_base_is_named_with_what_to_do(
    run: Run, damage: Callable[[Path], None], listed: str, read: str
) -> None:
    storage = run.saver.storage
    for step in (2, 4, 6):
        run.save(step)
    damage(Path(storage.address) / folder_name(2, 1) / DATA)
    states = [entry for entry in catalogue.entries(storage) if entry.folder != folder_name(2, 1)]
    if listed:
        assert {entry.state for entry in states} == {"damaged"}
        with pytest.raises(DamagedCheckpoint, match=_put_back(listed)):
            catalogue.read_manifest(storage, folder_name(6, 1))
    else:
        assert {entry.state for entry in states} == {"good"}, "`ls` reads no bytes"
    with pytest.raises(DamagedCheckpoint, match=_put_back(listed or read)):
        catalogue.verify(storage, folder_name(6, 1))
    manifest = catalogue.read_manifest(storage, folder_name(6, 1), check_sizes=False)
    with pytest.raises(DamagedCheckpoint, match=_put_back(read)):
        everything(storage, manifest)
    with pytest.raises(DamagedCheckpoint, match=_put_back(read)):
        b"".join(WholeTensors(storage, manifest).stream("model.base.weight"))
    if listed:
        assert run.save(8).referred_bytes == 0, "it is not referred to any more"
        assert catalogue.verify(storage, folder_name(8, 1)).step == 8


def test_a_resume_passes_over_what_refers_to_a_damaged_file(run: Run) -> None:
    storage = run.saver.storage
    run.save(2)
    run.save(4)
    with torch.no_grad():
        run.model.base.weight.fill_(5)
    run.save(6)
    run.save(8)
    _flip(Path(storage.address) / folder_name(6, 1) / DATA)
    where = f"{folder_name(6, 1)}/{DATA} is damaged at model.base.weight"
    said = rf"no checkpoint is good: {folder_name(8, 1)} \({where}; this checkpoint stores bytes"
    with pytest.raises(EnvironmentProblem, match=said):
        Run(storage)


# Indexes and manifests that somebody else wrote, with right checksums.


def _remade(storage: Storage, folder: str, change: Callable[[dict[str, Any]], Any]) -> None:
    body = json.loads(storage.read(f"{folder}/{NAME}"))
    del body["self_crc32"]
    change(body)
    text = json.dumps({**body, "self_crc32": fingerprint(body)})
    storage.put(f"{folder}/{NAME}", text.encode())


def _name(name: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda body: body["referred"][0].update(name=name)


@pytest.mark.parametrize(
    "change",
    [
        *(_name("../secret/data-00000.bin"), _name("/etc/data-00000.bin"), _name("data-00000.bin")),
        *(_name(f"{folder_name(4, 1)}/{DATA}"), _name(f"{folder_name(2, 1)}/../{DATA}")),
        *(_name(f"../{folder_name(2, 1)}/{DATA}"), _name(f"{folder_name(2, 1)}/manifest.json")),
        *(_name(f"{folder_name(2, 1)}/index.json"), _name(f"{folder_name(2, 1)}/x/{DATA}")),
        *(_name("step-2-a1/data-00000.bin"), _name(f"{folder_name(2, 1)}\\{DATA}"), _name(5)),
        *(_name(f"{folder_name(2, 1)}/{DATA}\n"), _name(f"./{folder_name(2, 1)}/{DATA}")),
        lambda body: body["referred"][0].update(size=-1),
        lambda body: body["referred"][0].update(size="9"),
        lambda body: body["referred"][0].update(used_bytes=10**9),
        lambda body: body["referred"][0].update(used_bytes=True),
        lambda body: body["referred"].append(body["referred"][0]),
        lambda body: body["referred"][0].update(more=1),
        lambda body: body.update(referred={"a": 1}),
        lambda body: body.update(referred=None),
        lambda body: body.pop("referred"),
        lambda body: body.update(format=1),
    ],
)
def test_a_reference_that_is_none_is_refused(
    run: Run, change: Callable[[dict[str, Any]], Any]
) -> None:
    storage = run.saver.storage
    for step in (2, 4):
        run.save(step)
    secret = Path(storage.address).parent / "secret"
    secret.mkdir()
    (secret / DATA).write_bytes(storage.read(f"{folder_name(2, 1)}/{DATA}"))
    _remade(storage, folder_name(4, 1), change)
    entry, _ = catalogue.entries(storage)
    assert entry.state == "damaged"
    assert entry.problem.startswith("manifest.json is not valid")


@pytest.mark.parametrize(
    ("position", "value", "match"),
    [
        (2, "../secret/data-00000.bin", "not a file of this checkpoint"),
        (2, f"{folder_name(2, 1)}/index.json", "not a file of this checkpoint"),
        (2, f"{folder_name(4, 1)}/{DATA}", "not a file of this checkpoint"),
        (3, 10**6, "outside of"),
        (3, -1, "outside of"),
        (6, "0" * 63, "an invalid digest"),
        (6, 5, "cannot be read"),
    ],
)
def test_an_index_that_refers_to_something_else_is_refused(
    run: Run, position: int, value: Any, match: str
) -> None:
    storage = run.saver.storage
    for step in (2, 4):
        run.save(step)
    folder = folder_name(4, 1)
    index = json.loads(storage.read(f"{folder}/index.json"))
    index["model.base.weight"]["chunks"][0][position] = value
    text = json.dumps(index).encode()
    storage.put(f"{folder}/index.json", text)

    def right(body: dict[str, Any]) -> None:
        body["files"][-1].update(size=len(text), crc32=checksum(text))

    _remade(storage, folder, right)
    with pytest.raises(DamagedCheckpoint, match=match):
        catalogue.verify(storage, folder)
    with pytest.raises(DamagedCheckpoint, match=match):
        everything(storage, catalogue.read_manifest(storage, folder))


def test_a_manifest_with_references_comes_back(run: Run) -> None:
    run.save(2)
    run.save(4)
    manifest = run.manifest(4)
    assert Manifest.from_json(manifest.to_json()) == manifest
    run.saver.amend(4, lambda values: {**values, "score": 1})
    assert run.manifest(4).referred == manifest.referred
    plain = replace(manifest, referred=None)
    assert json.loads(plain.to_json())["format"] == 1


def test_a_store_is_found_by_its_address_too(tmp_path: Path) -> None:
    run = Run(storage_at(f"file://{tmp_path}"))
    run.save(2)
    assert run.save(4).referred_bytes == BASE_BYTES
