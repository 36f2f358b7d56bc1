"""The step after which an error counts, as the supervisor reads it from the rank's page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from drivetrain import Hook, Task, Trainer, prepare
from drivetrain.record.session import ProgressPage, page_path, read_progress


class Bug(Exception): ...


class FailsAfterTwo(Hook):
    def on_train_batch_end(self, trainer: Trainer, step: int) -> None:
        if step == 2:
            raise Bug


def own_loop(config: dict[str, Any], data: TensorDataset) -> None:
    model = nn.Linear(4, 2)
    loop = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data, config)
    for step in loop.steps():
        for (x,) in step:
            loop.backward(loop.model(x).sum())
        loop.step()
        if loop.step_number == 2:
            raise Bug


def fit(config: dict[str, Any], data: TensorDataset) -> None:
    task = Task(model=lambda: nn.Linear(4, 2), loss=lambda model, batch: model(*batch).sum())
    Trainer(task, config, hooks=[FailsAfterTwo()]).fit(data)


@pytest.mark.parametrize("train", [own_loop, fit])
def test_an_error_after_a_steps_update_counts_as_after_that_step(
    train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number is the one in the progress lines, although the loop has not taken over yet."""
    monkeypatch.setattr(
        ProgressPage, "of_this_rank", lambda rank: ProgressPage(page_path(tmp_path, rank))
    )
    config = {
        "global_batch_size": 8,
        "max_steps": 3,
        "output_dir": str(tmp_path),
        "checkpoint": {"every_steps": None},
        "record": {"progress": "none", "sinks": []},
    }
    with pytest.raises(Bug):
        train(config, TensorDataset(torch.ones(16, 4)))
    page = read_progress(tmp_path, 0)
    assert page is not None
    assert page.step == 2
