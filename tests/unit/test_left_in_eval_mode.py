"""A model that the script's own evaluation left in eval mode, in a loop of one's own."""

from __future__ import annotations

from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from drivetrain import prepare
from drivetrain.testing import run_ranks

SAID = "is in eval mode at backward in step 3: it is trained without dropout"


def config(output_dir: str) -> dict[str, Any]:
    return {
        "global_batch_size": 8,
        "micro_batch_size": 4,
        "max_steps": 5,
        "output_dir": output_dir,
        "record": {"progress": "plain", "sinks": []},
    }


def train(output_dir: str, restores: bool = False, evaluates: bool = False) -> None:
    model = nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.1)).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.ones(64, 4))
    loop = prepare(model, optimizer, data, config(output_dir))
    for step in loop.steps():
        for (x,) in step:
            loop.backward(loop.model(x).mean())
        loop.step()
        if evaluates:
            loop.evaluate(data, lambda model, batch: {"mean": model(batch[0]).mean()})
        elif loop.step_number >= 2:
            model.eval()
            if restores:
                loop.model.train()


def test_it_is_announced_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(str(tmp_path))
    said = "".join(capsys.readouterr())
    assert said.count("eval mode") == 1
    assert f"warning: the model {SAID}" in said


def test_one_in_train_mode_is_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(str(tmp_path), restores=True)
    train(str(tmp_path), evaluates=True)
    assert "eval mode" not in "".join(capsys.readouterr())


def test_of_several_models_it_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models = {"G": nn.Linear(4, 2), "D": nn.Linear(4, 2)}
    optimizers = {n: torch.optim.SGD(m.parameters(), lr=0.1) for n, m in models.items()}
    loop = prepare(models, optimizers, TensorDataset(torch.ones(64, 4)), config(str(tmp_path)))
    for step in loop.steps():
        for name in models:
            for (x,) in step:
                loop.backward(loop.model[name](x).mean(), name)
            loop.step(name)
        if loop.step_number == 2:
            models["D"].eval()
    said = "".join(capsys.readouterr())
    assert said.count("eval mode") == 1
    assert f"warning: the model D {SAID}" in said


def on_a_rank(output_dir: str) -> str:
    with redirect_stdout(StringIO()) as said, redirect_stderr(said):
        train(output_dir)
    return said.getvalue()


def test_wrapped_for_ranks_it_is_the_same(tmp_path: Path) -> None:
    """The script has its own module, the loop calls DDP's."""
    said = run_ranks(on_a_rank, 2, 120, args=(str(tmp_path),))
    assert "".join(said).count(SAID) == 1
