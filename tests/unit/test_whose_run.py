"""A run belongs to its newest attempt, and a storage that cannot be read is not damage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.utils.data import TensorDataset

from drivetrain import Hook, Task, Trainer
from drivetrain.checkpoint import catalogue, lineage
from drivetrain.checkpoint.storage import LocalStorage, storage_at


def train(config: dict[str, Any], *hooks: Hook) -> None:
    inputs = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    task = Task(
        lambda: nn.Linear(4, 2), lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])
    )
    Trainer(task, config, list(hooks)).fit(TensorDataset(inputs, (inputs.sum(1) > 0).long()))


@pytest.fixture
def config(quiet: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    saving = {"every_steps": 2, "directory": str(tmp_path / "saved"), "asynchronous": False}
    return {"global_batch_size": 8, "max_steps": 6, **quiet, "checkpoint": saving}


class Overtakes(Hook):
    """Somebody else goes on with the run from its second step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Trainer, step: int) -> None:
        if step == 3:
            lineage.claim_next(storage_at(str(self.folder)), 2)


def test_an_attempt_that_was_overtaken_commits_nothing_more(
    config: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(lineage.StaleAttempt, match="attempt 2 has taken over this run"):
        train(config, Overtakes(tmp_path / "saved"))
    entries = catalogue.entries(storage_at(str(tmp_path / "saved")))
    assert [entry.step for entry in entries if entry.manifest is not None] == [2]


def test_a_checkpoint_that_cannot_be_read_just_now_is_not_passed_over(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one before it is good: the run would lose two steps, and say that there was damage."""
    train({**config, "max_steps": 4})
    read, num_read = LocalStorage.read, 0

    def fails(self: LocalStorage, name: str, *args: Any, **options: Any) -> bytes:
        nonlocal num_read
        num_read += name.startswith("step-000000004") and name.endswith(".bin")
        if num_read > 1:  # after what the rank alone had: the tensors
            raise PermissionError(13, "Permission denied", name)
        return read(self, name, *args, **options)

    monkeypatch.setattr(LocalStorage, "read", fails)
    resumed = {**config["checkpoint"], "resume_from": config["checkpoint"]["directory"]}
    with pytest.raises(CheckpointException, match="Permission denied"):
        train({**config, "checkpoint": resumed})
