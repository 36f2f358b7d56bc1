"""What is on disk, and in which order: a power cut must find a whole checkpoint, or none.

Every system call that matters is written down by name, in the order in which it was made.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.checkpoint import lineage
from drivetrain.checkpoint.manifest import NAME
from drivetrain.checkpoint.storage import LocalStorage, storage_at
from drivetrain.core.errors import ConfigError
from drivetrain.data.batches import MicroBatch
from drivetrain.record.run_directory import RunDirectory
from drivetrain.train.saving import saver
from drivetrain.train.task import Total
from drivetrain.train.trainer import Trainer
from drivetrain.train.watch.meter import Meter
from tests.ranks.resuming import go_on_in
from tests.ranks.small_task import samples, small_task
from tests.unit.test_timetable import alone

Calls = list[tuple[str, str]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """(what, path); names of files beside are given without their random part."""
    made: Calls = []

    def note(what: str, path: Any) -> None:
        text = os.fspath(path)
        if text.endswith(".partial"):
            folder, _, name = text.rpartition("/")
            text = f"{folder}/{name[1:].rsplit('.', 2)[0]} (partial)"
        made.append((what, text))

    def spy(module: Any, name: str, what: str, which: int) -> None:
        real: Callable[..., Any] = getattr(module, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            note(what, args[which])
            return real(*args, **kwargs)

        monkeypatch.setattr(module, name, call)

    real_fsync = os.fsync

    def fsync(descriptor: int) -> None:
        note("sync", os.readlink(f"/proc/self/fd/{descriptor}"))
        real_fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    spy(os, "replace", "rename to", 1)
    spy(os, "link", "link to", 1)
    spy(os, "mkdir", "make", 0)
    spy(os, "unlink", "delete", 0)
    spy(Path, "unlink", "delete", 0)
    spy(shutil, "rmtree", "delete", 0)
    return made


def in_order(calls: Calls, *wanted: tuple[str, Path | str]) -> None:
    """Each of them was made, after the one before."""
    left = iter(calls)
    for what, path in wanted:
        assert (what, str(path)) in left, f"no {what} {path} (in time) in {calls}"


def train(run: Path, monkeypatch: pytest.MonkeyPatch, width: int = 8, **rule: Any) -> Trainer:
    go_on_in(run, monkeypatch)
    monkeypatch.setattr(saver, "_PAUSE_S", 0.0)
    config = {
        "global_batch_size": 8,
        "max_steps": 4,
        "checkpoint": {"every_steps": 2, "keep_last": 1, "asynchronous": False, **rule},
        "record": {"progress": "none", "sinks": []},
    }
    trainer = Trainer(small_task(width), config)
    trainer.fit(samples())
    return trainer


def test_a_checkpoint_is_on_disk_before_its_manifest_and_that_before_an_old_one_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: Calls
) -> None:
    train(tmp_path / "run", monkeypatch)
    root = tmp_path / "run" / "checkpoints"
    old, new = root / "step-000000002-a1", root / "step-000000004-a1"
    in_order(calls, ("make", root), ("sync", root.parent), ("rename to", old / NAME))
    for synced in (root, new / "data-00000.bin", new / "index.json", new / f"{NAME} (partial)"):
        in_order(calls, ("make", new), ("sync", synced), ("rename to", new / NAME))
    in_order(calls, ("rename to", new / NAME), ("sync", new), ("delete", old / NAME))


def test_a_step_that_goes_loses_its_manifest_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: Calls
) -> None:
    """So that half of a deleted checkpoint never counts as one."""
    train(tmp_path / "run", monkeypatch)
    old = tmp_path / "run" / "checkpoints" / "step-000000002-a1"
    in_order(calls, ("delete", old / NAME), ("sync", old), ("delete", old))
    assert not old.exists()


def test_a_claim_is_on_disk_when_it_is_made(tmp_path: Path, calls: Calls) -> None:
    lineage.claim_next(storage_at(tmp_path), 0)
    name = "attempt-00001.json"
    in_order(
        calls,
        ("sync", tmp_path / f"{name} (partial)"),
        ("link to", tmp_path / name),
        ("sync", tmp_path),
    )


def test_the_weights_are_on_disk_when_the_run_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: Calls
) -> None:
    train(tmp_path / "run", monkeypatch)
    folder = tmp_path / "run" / "checkpoints"
    in_order(
        calls,
        ("sync", folder / "weights.pt (partial)"),
        ("rename to", folder / "weights.pt"),
        ("sync", folder),
    )


def test_what_a_resume_goes_by_is_on_disk(tmp_path: Path, calls: Calls) -> None:
    directory = RunDirectory.at(tmp_path / "run")
    directory.write_run_yaml("config: {}")
    directory.begin_attempt(1, {})
    for path in (directory.run_yaml, directory.attempt(1) / "start.json"):
        partial = path.with_name(f"{path.name} (partial)")
        in_order(calls, ("sync", partial), ("rename to", path), ("sync", path.parent))


# Guards that nothing else would notice the loss of


def test_the_last_save_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, tries = LocalStorage.writing, []

    def writing(self: LocalStorage, name: str) -> Any:
        if name.startswith("step-000000004"):
            tries.append(name)
            if len(tries) == 1:
                raise OSError(28, "No space left on device")
        return real(self, name)

    monkeypatch.setattr(LocalStorage, "writing", writing)
    train(tmp_path / "run", monkeypatch)
    assert (tmp_path / "run" / "checkpoints" / "step-000000004-a1" / NAME).is_file()
    assert len(tries) > 1


def test_a_model_of_other_shapes_is_refused_before_anything_is_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path / "run", monkeypatch, width=8)
    before = sorted((tmp_path / "run" / "checkpoints").iterdir())
    said = r"0\.weight = \(9, 4\): checkpoint step-000000004-a1 has shape \(8, 4\)"
    with pytest.raises(ConfigError, match=said):
        train(tmp_path / "run", monkeypatch, width=9)
    assert sorted((tmp_path / "run" / "checkpoints").iterdir()) == before


def test_a_step_in_which_nothing_was_counted_leaves_zero_gradients_and_a_zero_loss() -> None:
    meter = Meter(alone())
    micro = MicroBatch(step=0, index=0, start=0, stop=2, batch_samples=2, epoch=0)
    meter.note_batch(micro)
    meter.add(Total(torch.tensor(0.0), 0), micro)
    correction = meter.count_correction()
    assert correction is not None
    assert (torch.zeros(2) * correction).tolist() == [0.0, 0.0], "and not 0 × inf"
    meter.end_step(1, 0.1)
    (metrics,) = meter.collect()
    assert (metrics.loss, metrics.num_tokens) == (0.0, 0.0)
