"""A rehearsal of a script that trains on a stream."""

from __future__ import annotations

from pathlib import Path

import pytest

from drivetrain.rehearse.client import RehearsalRequest, rehearse

SCRIPT = """
import torch
from torch import nn
from torch.utils.data import IterableDataset
from drivetrain import Task, Trainer, load_config

class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.ones(4096, 256))

task = Task(lambda: nn.Linear(256, 2), lambda model, batch: model(batch).square().mean())
Trainer(task, load_config(defaults={"global_batch_size": 512, "micro_batch_size": 4})).fit(Stream())
"""


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("sharding", ["same_stream", "already_sharded"])
def test_what_is_read_is_not_the_models_memory(sharding: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    words = (str(script), "max_steps=4", f"data.iterable_sharding={sharding}")
    rehearsal = rehearse(RehearsalRequest(words, 128, "all-kinds", timeout_s=300))
    assert rehearsal.findings == ()
    a_batch = 512 * 256 * 4
    for report in rehearsal.reports:
        assert report.memory.peak < a_batch / 4, "a rank has 4 of the 512 samples on its device"
