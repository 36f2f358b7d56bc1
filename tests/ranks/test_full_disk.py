"""A disk that gives trouble during a run: a warning and a retry, and no broken checkpoint."""

from __future__ import annotations

import errno
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from drivetrain.checkpoint import catalogue, checkpointer
from drivetrain.checkpoint.storage import LocalStorage, storage_at
from drivetrain.core.errors import NotSaved
from drivetrain.train.hooks import Hook
from drivetrain.train.keep_loop import prepare
from drivetrain.train.saving import rank_sync, saver, timetable
from drivetrain.train.trainer import Trainer
from tests.ranks.resuming import go_on_in
from tests.ranks.small_task import samples, small_task


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """One megabyte, and not a byte more: some twenty checkpoints of the small model."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a small file system")
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", path], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount here: {mounted.stderr.decode().strip()}")
    yield path
    subprocess.run(["umount", path], check=True)


class Filler(Hook):
    """Somebody else's file, which comes and goes."""

    def __init__(self, disk: Path, fill_at: int, free_at: int | None) -> None:
        self.file = disk / "somebody-elses.bin"
        self.fill_at, self.free_at = fill_at, free_at
        self.states: dict[int, list[str]] = {}

    def on_train_batch_start(self, trainer: Trainer, step: int) -> None:
        entries = catalogue.entries(storage_at(self.file.parent / "checkpoints"))
        self.states[step - 1] = [entry.state for entry in entries]
        if step - 1 == self.fill_at:
            fill(self.file)
        if step - 1 == self.free_at:
            self.file.unlink()


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return


def train(
    disk: Path, filler: Filler, monkeypatch: pytest.MonkeyPatch, **rule: Any
) -> tuple[Trainer, list[dict[str, Any]]]:
    """Twelve steps, the events of the saves included."""
    run = disk.parent / "run"
    go_on_in(run, monkeypatch)
    monkeypatch.setattr(saver, "_PAUSE_S", 0.0)
    trainer = Trainer(
        small_task(),
        {
            "global_batch_size": 8,
            "max_steps": 12,
            "checkpoint": {
                "directory": str(disk / "checkpoints"),
                "every_steps": 2,
                "asynchronous": False,
                **rule,
            },
            "record": {"progress": "plain", "sinks": []},
        },
        hooks=[filler],
    )
    trainer.fit(samples())
    return trainer, instants(run)


def instants(run: Path) -> list[dict[str, Any]]:
    lines = (run / "events" / "00000.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == "instant"]


def steps_of(events: list[dict[str, Any]], name: str) -> list[int]:
    return [event["fields"]["step"] for event in events if event["name"] == name]


def test_saves_fail_while_it_is_full_and_succeed_after(
    disk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    filler = Filler(disk, fill_at=3, free_at=8)
    _, events = train(disk, filler, monkeypatch)
    assert steps_of(events, "saved") == [2, 10, 12]
    assert steps_of(events, "save_failed") == [4, 6, 8]
    assert filler.states[8] == ["good"], "nothing half-written is left, and the old one still is"
    said = capsys.readouterr().out
    assert "step 4 could not be saved (OSError: [Errno 28] No space left on device" in said
    assert "training continues, and the save is retried" in said
    storage = storage_at(disk / "checkpoints")
    entries = catalogue.entries(storage)
    assert [(entry.step, entry.state) for entry in entries] == [(12, "good"), (10, "good")]
    for entry in entries:
        catalogue.verify(storage, entry.folder)


def test_a_failed_save_is_tried_again_before_the_next_is_due(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timetable, "_RETRY_AFTER_S", 0.0)
    monkeypatch.setattr(rank_sync, "SECONDS_BETWEEN", 0.0)
    filler = Filler(disk, fill_at=3, free_at=6)
    _, events = train(disk, filler, monkeypatch, every_steps=4)
    assert steps_of(events, "save_failed") == [4, 5, 6]
    assert steps_of(events, "saved") == [7, 8, 12], "space came back in step 7"


def test_a_save_beside_the_steps_fails_beside_them(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filler = Filler(disk, fill_at=3, free_at=8)
    trainer, events = train(disk, filler, monkeypatch, asynchronous=True)
    assert {4, 6} <= set(steps_of(events, "save_failed"))
    assert 12 in steps_of(events, "saved")
    assert len(trainer.history.steps) == 12
    storage = storage_at(disk / "checkpoints")
    assert {entry.state for entry in catalogue.entries(storage)} == {"good"}


def test_an_old_one_that_cannot_be_deleted_does_not_cost_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove = LocalStorage.remove

    def refuse(self: LocalStorage, name: str) -> None:
        if name.startswith("step-000000002-"):
            raise PermissionError(13, "Permission denied")
        remove(self, name)

    monkeypatch.setattr(LocalStorage, "remove", refuse)
    with pytest.warns(UserWarning, match="an outdated checkpoint was not deleted: .*denied"):
        _, events = train(tmp_path / "disk", Filler(tmp_path, -1, None), monkeypatch)
    assert steps_of(events, "saved") == [2, 4, 6, 8, 10, 12]
    newest = catalogue.entries(storage_at(tmp_path / "disk" / "checkpoints"))[0]
    assert (newest.step, newest.state) == (12, "good")


def test_a_run_whose_last_step_cannot_be_saved_does_not_end_in_success(
    disk: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    filler = Filler(disk, fill_at=3, free_at=None)
    with pytest.raises(NotSaved, match=r"step 12 .*No space left.*newest is from step 2;") as why:
        train(disk, filler, monkeypatch)
    assert why.value.exit_code not in (0, 1, 75)
    events = instants(tmp_path / "run")
    assert steps_of(events, "saved") == [2]
    assert steps_of(events, "save_failed") == [4, 6, 8, 10, 12, 12, 12], "the last is insisted on"
    assert steps_of(events, "run_failed") == [12]
    assert (tmp_path / "run" / "checkpoints" / "weights.pt").is_file(), "there was room for this"
    entries = catalogue.entries(storage_at(disk / "checkpoints"))
    assert [(entry.step, entry.state) for entry in entries] == [(2, "good")]


def test_weights_that_find_no_room_do_not_hide_that_the_last_step_is_not_saved(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's writer fails with a RuntimeError, which would have been retried."""
    (disk / "weights").mkdir()
    (disk.parent / "run").mkdir()
    (disk.parent / "run" / "checkpoints").symlink_to(disk / "weights")
    with pytest.raises(NotSaved, match=r"step 12 .*No space left"):
        train(disk, Filler(disk, 3, None), monkeypatch)


def test_a_run_that_cannot_claim_its_checkpoints_says_so(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(disk / "somebody-elses.bin")
    monkeypatch.setattr(checkpointer, "_PAUSE_S", 0.0)
    with pytest.raises(NotSaved, match=r"cannot write to .*No space left"):
        train(disk, Filler(disk, -1, None), monkeypatch)


def test_a_loop_of_ones_own_whose_last_step_cannot_be_saved_does_not_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on_in(tmp_path / "run", monkeypatch)
    monkeypatch.setattr(saver, "_PAUSE_S", 0.0)
    config = {
        "global_batch_size": 8,
        "max_steps": 3,
        "checkpoint": {"every_steps": 2, "asynchronous": False},
        "record": {"progress": "none", "sinks": []},
    }
    torch.manual_seed(0)
    loop = prepare(torch.nn.Linear(4, 2), None, TensorDataset(torch.randn(8, 4)), config)

    def train() -> None:
        for step in loop.steps():
            for (batch,) in step:
                loop.backward(loop.model(batch).square().mean())
            loop.step()
            if loop._at.step == 3:
                monkeypatch.setattr(LocalStorage, "writing", no_space)

    with pytest.raises(NotSaved, match=r"step 3 .*No space left.*newest is from step 2;"):
        train()


def no_space(self: LocalStorage, name: str) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device", name)
