"""A rehearsal of a loss over all ranks' rows: what is gathered, and what it takes, is counted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from drivetrain.rehearse.client import RehearsalRequest, rehearse

SCRIPT = """
import torch
from torch import nn
from drivetrain import Task, Trainer, gather

def loss(model, batch):
    rows = gather(model(batch))
    return (rows @ rows.T).square().mean()

data = [torch.randn(4) for _ in range(1000)]  # of 768 samples a step: the second has 232
config = {"global_batch_size": 768, "max_steps": 2, "optimization": {"learning_rate": 1e-3}}
Trainer(Task(lambda: nn.Linear(4, 8), loss), config).fit(data)
"""


@pytest.mark.slow
def test_the_rows_of_all_ranks_are_gathered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("gathers.py").write_text(SCRIPT)
    found = rehearse(RehearsalRequest(("gathers.py",), 32))
    assert not found.findings  # not that ranks of 8 and of 7 rows would differ
    for report in found.reports:
        assert not report.failure
        gathers = [call for call in report.in_step if call.name == "all_gather"]
        assert [len(call.ranks) for call in gathers] == [32]
        assert report.memory.peak > 768 * 768 * 4  # products of all rows with all rows


@pytest.mark.slow
def test_a_plan_says_that_it_knows_nothing_of_it(tmp_path: Path) -> None:
    (tmp_path / "gathers.py").write_text(SCRIPT)
    words = [sys.executable, "-m", "drivetrain", "plan", "gathers.py", "--cluster", "a100-80:8"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "this plan leaves out the memory and traffic of that" in done.stderr
