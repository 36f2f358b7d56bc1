"""A loss and its parts: recorded over all ranks, and without a part in what is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from drivetrain import ConfigError, Task, Total, Trainer, open_run, prepare
from drivetrain.testing import run_ranks

DATA = TensorDataset(torch.randn(23, 4, generator=torch.Generator().manual_seed(3)))


def settings(output_dir: Path | str, **changes: Any) -> dict[str, Any]:
    return {
        "output_dir": str(output_dir),
        "global_batch_size": 6,
        "micro_batch_size": 2,
        "num_train_epochs": 1,
        "record": {"progress": "none", "sinks": [], "logging_steps": 2},
        **changes,
    }


def plain(model: nn.Module, batch: Any) -> Any:
    return model(batch[0]).square().mean() + 0.1 * model(batch[0]).abs().mean()


def in_parts(model: nn.Module, batch: Any) -> Any:
    out = model(batch[0])
    square, size = out.square().mean(), out.abs()
    above = Total((out > 0).sum(), out.numel())
    return square + 0.1 * size.mean(), {"square": square, "size": size.mean(), "above": above}


def trained(output_dir: str) -> tuple[list[float], list[dict[str, float]]]:
    task = Task(model=lambda: nn.Linear(4, 1), loss=in_parts)
    history = Trainer(task, settings(output_dir)).fit(DATA)
    return history.losses, [dict(step.parts) for step in history.steps]


def test_parts_are_means_over_the_whole_batch_on_any_number_of_ranks(tmp_path: Path) -> None:
    alone = Trainer(Task(lambda: nn.Linear(4, 1), plain), settings(tmp_path)).fit(DATA)
    losses, parts = trained(str(tmp_path))
    assert losses == pytest.approx(alone.losses, rel=1e-6)
    for loss, part in zip(losses, parts, strict=True):
        assert loss == pytest.approx(part["square"] + 0.1 * part["size"], rel=1e-6)
        assert 0.0 <= part["above"] <= 1.0
    # the last batch has 5 samples: of 4 ranks one has none
    for num_ranks in (2, 4):
        for theirs, of_rank in run_ranks(trained, num_ranks, 120, args=(str(tmp_path),)):
            assert theirs == pytest.approx(losses, rel=1e-5)
            for here, there in zip(of_rank, parts, strict=True):
                assert here == pytest.approx(there, rel=1e-5)


def test_they_are_recorded_shown_and_evaluated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = Task(model=lambda: nn.Linear(4, 1), loss=in_parts)
    record = {"progress": "plain", "sinks": [], "logging_steps": 1}
    history = Trainer(task, settings(tmp_path, record=record)).fit(DATA, DATA)
    assert set(history.evaluations[-1].metrics) == {"loss", "square", "size", "above"}
    assert "  square " in capsys.readouterr().out
    assert history.run_dir is not None
    shown = open_run(history.run_dir).scalars()["train/square"]
    assert list(shown.values) == pytest.approx([step.parts["square"] for step in history.steps])


def test_a_loop_of_ones_own_has_them_too(tmp_path: Path) -> None:
    loop = prepare(lambda: nn.Linear(4, 1), None, DATA, settings(tmp_path))
    for step in loop.steps():
        for batch in step:
            loop.backward(in_parts(loop.model, batch))
        loop.step()
    assert set(loop.history.steps[0].parts) == {"square", "size", "above"}


class LateName:
    """A part that has no name before the third batch of the data."""

    calls = 0

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        self.calls += 1
        loss = plain(model, batch)
        return loss, {"early": loss} if self.calls < 7 else {"early": loss, "late": loss}


@pytest.mark.parametrize(
    ("loss", "sentence"),
    [
        (
            lambda m, b: (plain(m, b), {"x": m(b[0])}),
            "loss parts\\['x'\\] .* is not a single number",
        ),
        (lambda m, b: (plain(m, b), plain(m, b)), "loss = 2 values: is a tuple; return the loss"),
        (lambda m, b: (plain(m, b),), "loss = 1 values: is a tuple"),
        (LateName(), "loss = late: appears in the parts of the loss only later"),
    ],
)
def test_what_is_no_loss_with_parts_is_said(tmp_path: Path, loss: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Trainer(Task(lambda: nn.Linear(4, 1), loss), settings(tmp_path)).fit(DATA)
