"""Masks follow the micro-batch: a size that nobody stated, and that ranks may change, is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from drivetrain import Task, Trainer


def told(model: nn.Module, folder: Path, capsys: pytest.CaptureFixture[str], **said: int) -> str:
    config = {"global_batch_size": 8, "max_steps": 1, "output_dir": str(folder), **said}
    data = [torch.randn(4) for _ in range(8)]
    Trainer(Task(lambda: model, lambda m, x: m(x).square().mean()), config).fit(data)
    return capsys.readouterr().out


def test_dropout_with_a_chosen_micro_batch_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dropped = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1))
    line = "dropout: masks are drawn for each micro-batch, and micro_batch_size=8 was chosen"
    assert line in told(dropped, tmp_path / "chosen", capsys)
    assert "dropout:" not in told(dropped, tmp_path / "stated", capsys, micro_batch_size=4)
    assert "dropout:" not in told(nn.Linear(4, 4), tmp_path / "none", capsys)
    never = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0))
    assert "dropout:" not in told(never, tmp_path / "never", capsys)
