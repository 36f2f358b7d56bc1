"""What a run says to do about a loss that is not finite: only what can help in this run."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from drivetrain import Task, Trainer, prepare
from drivetrain.core.errors import NonFiniteLoss
from drivetrain.diagnose import divergence
from drivetrain.diagnose.evidence import Evidence, read_evidence
from drivetrain.diagnose.run import diagnose
from drivetrain.record.reading import open_run
from drivetrain.record.recorder import Recorder
from drivetrain.record.run_directory import RunDirectory


class Logarithm(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x - x).log() * 0


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def data(bad: float = 0.0) -> TensorDataset:
    x = torch.ones(8, 4)
    x[5] += bad
    return TensorDataset(x, torch.zeros(8, 4))


def broken() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), Logarithm())


def not_finite(
    quiet: dict[str, Any],
    model: Callable[[], nn.Module] = broken,
    dataset: TensorDataset | None = None,
    precision: str = "fp32",
    **optimization: Any,
) -> str:
    """Train until it fails; return the error's message."""
    config = {
        **quiet,
        "global_batch_size": 8,
        "max_steps": 2,
        "optimization": optimization,
        "precision": {"dtype": precision},
    }
    with pytest.raises(NonFiniteLoss) as error:
        Trainer(Task(model=model, loss=loss), config).fit(dataset or data())
    return str(error.value)


def test_the_module_is_named_and_only_settings_that_are_not_set_are_advised(
    quiet: dict[str, Any],
) -> None:
    said = not_finite(quiet)
    assert said.endswith(
        "; look for a division, a log or a sqrt in module 1; if there is none, "
        "lower optimization.learning_rate or set optimization.max_grad_norm"
    )
    clipped = not_finite(quiet, max_grad_norm=1.0)
    assert clipped.endswith("; if there is none, lower optimization.learning_rate")
    assert "precision" not in said + clipped


def test_another_precision_is_advised_only_to_a_run_in_a_lower_one(quiet: dict[str, Any]) -> None:
    said = not_finite(quiet, precision="bf16", max_grad_norm=1.0)
    assert said.endswith("lower optimization.learning_rate or try precision.dtype=fp32")


def test_data_that_is_not_finite_needs_no_other_settings(quiet: dict[str, Any]) -> None:
    said = not_finite(quiet, lambda: nn.Linear(4, 4), data(math.nan))
    assert said.endswith("(samples [5]); look at those samples: the data itself is not finite")


def test_weights_that_are_not_finite_at_the_first_step_come_from_the_start(
    quiet: dict[str, Any],
) -> None:
    def model() -> nn.Module:
        made = nn.Linear(4, 4)
        nn.init.constant_(made.weight, math.inf)
        return made

    said = not_finite(quiet, model)
    assert "first in the parameter weight" in said
    assert said.endswith("look at how the model is initialized, and at the weights it loads")


def test_the_rate_of_an_optimizer_of_the_scripts_is_not_looked_for_in_the_config(
    quiet: dict[str, Any],
) -> None:
    model = broken()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {**quiet, "global_batch_size": 8, "max_steps": 2}
    loop = prepare(model, optimizer, data(), config)
    with pytest.raises(NonFiniteLoss) as error:
        for step in loop.steps():
            for batch in step:
                loop.backward(loss(loop.model, batch))
            loop.step()
    said = str(error.value)
    assert said.endswith(
        "lower the learning rate of the script's optimizer or set optimization.max_grad_norm"
    )
    assert "module" not in said


def test_diagnose_advises_what_the_run_advised(quiet: dict[str, Any], tmp_path: Path) -> None:
    said = not_finite(quiet)
    run = open_run(next(tmp_path.glob("*/run.yaml")).parent)
    found = divergence.judge(read_evidence(run, run.attempts()[-1]))
    assert found is not None
    assert found.remedy == said.partition("; ")[2]
    failure = {"error": f"Traceback\nNonFiniteLoss: {said}\n", "rank": 0, "exit_code": 6}
    without_report = divergence.judge(Evidence(1, end={"failures": [failure]}))
    assert without_report is not None
    assert without_report.remedy == found.remedy
    assert without_report.evidence == ("train/loss = nan at step 1",)


def test_diagnose_names_every_rank_that_found_it() -> None:
    said = "NonFiniteLoss: train/loss = nan at step 4{}: the loss is not finite; look"
    errors = [said.format(where) for where in (" on rank 2", " on rank 0", "")]
    failures = [{"error": error, "rank": 9, "exit_code": 6} for error in errors]
    found = divergence.judge(Evidence(1, end={"failures": failures}))
    assert found is not None
    assert found.what == "the loss became NaN or infinite at step 4 on ranks 0 and 2"
    assert found.ranks == (0, 2)
    mean = divergence.judge(Evidence(1, end={"failures": failures[2:]}))
    assert mean is not None
    assert mean.what == "the loss became NaN or infinite at step 4"
    report = {"found_in": "loss", "name": "loss", "what": "the loss", "step": 4}
    report |= {"num_nan": 1, "num_inf": 0, "num_elements": 1}
    reports = {0: report, 2: report, 1: report | {"step": 5}}
    found = divergence.judge(Evidence(1, end={}, non_finite=reports))
    assert found is not None
    assert found.evidence[1:] == ("not finite at this step on ranks 0 and 2",)


@pytest.mark.parametrize(
    ("max_grad_norm", "own", "remedy"),
    [
        (
            "null",
            "default",
            "lower the learning rate (optimization.learning_rate, or in the script if it makes its "
            "own optimizer) or set optimization.max_grad_norm or warm up longer; ",
        ),
        ("1.0", "'unused: it'", "lower the learning rate of the script's optimizer or warm up"),
    ],
)
def test_a_spike_advises_what_the_config_has_not_set(
    max_grad_norm: str, own: str, remedy: str, tmp_path: Path
) -> None:
    RunDirectory.create(tmp_path, "spiked").write_run_yaml(
        f"config: {{optimization: {{max_grad_norm: {max_grad_norm}}}}}\n"
        f"sources: {{optimization.learning_rate: {own}}}\n"
    )
    recorder = Recorder(tmp_path / "spiked" / "events" / "00000.jsonl")
    for step in range(1, 61):
        recorder.scalars(step, {"train/loss": 50.0 if step == 60 else 1.0 + 0.01 * (step % 3)})
    recorder.close()
    (found,) = diagnose(tmp_path / "spiked")
    assert found.remedy.startswith(remedy)
