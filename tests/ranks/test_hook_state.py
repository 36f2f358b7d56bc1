"""What a hook has saved is there again, on another number of ranks too."""

from __future__ import annotations

import os
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from drivetrain.record.session import RUN_DIR
from drivetrain.testing import run_ranks
from drivetrain.train.hooks import Hook
from drivetrain.train.trainer import Trainer
from tests.accelerator.small_runs import batch_norm_task, samples, settings


class Counting(Hook):
    def __init__(self) -> None:
        self.steps = 0

    def on_train_batch_end(self, trainer: Trainer, step: int) -> None:
        self.steps += 1

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


def train(folder: str, steps: int) -> tuple[int, str]:
    os.environ[RUN_DIR] = folder
    counting = Counting()
    more = {"record": {"progress": "plain", "sinks": []}}
    with redirect_stdout(StringIO()) as said:
        Trainer(batch_norm_task(), settings(steps, **more), [counting]).fit(samples())
    return counting.steps, said.getvalue()


@pytest.mark.timeout(200)
def test_a_hook_counts_on_when_the_ranks_change(tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    assert [steps for steps, _ in run_ranks(train, 2, 90, args=(folder, 4))] == [4, 4]
    ((steps, said),) = run_ranks(train, 1, 90, args=(folder, 8))
    assert steps == 8
    assert "saved with another layout: every rank uses rank 0's" in said
