"""What every step does, done the quick way: the same results as torch's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from drivetrain import Hook, Task, Trainer
from drivetrain.core.errors import NonFiniteLoss
from drivetrain.parallel.parts import total_norm
from drivetrain.record.recorder import Recorder
from drivetrain.record.step_file import StepTimes


def data() -> TensorDataset:
    x = torch.randn(48, 4, generator=torch.Generator().manual_seed(1))
    return TensorDataset(torch.arange(48.0), x, (x.sum(1) > 0).long())


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[1]), batch[2])


def config(folder: Path, **changes: Any) -> dict[str, Any]:
    return {
        "global_batch_size": 8,
        "micro_batch_size": 2,
        "max_steps": 3,
        "output_dir": str(folder),
        "optimization": {"max_grad_norm": 0.1},
        "checkpoint": {"every_steps": None},
        "record": {"logging_steps": 2, "sinks": [], "progress": "none"},
        **changes,
    }


@pytest.mark.parametrize(
    "dtypes",
    [
        [torch.float32] * 5,
        [torch.float64] * 3,
        [torch.float32, torch.bfloat16, torch.float32, torch.float64],
        [],
    ],
    ids=["one kind", "double", "several kinds", "none"],
)
def test_the_norm_of_gradients_has_the_bits_of_torchs(dtypes: list[torch.dtype]) -> None:
    generator = torch.Generator().manual_seed(0)
    gradients = [
        torch.randn(7, index + 3, generator=generator).to(dtype)
        for index, dtype in enumerate(dtypes)
    ]
    assert torch.equal(total_norm(gradients), torch.nn.utils.get_total_norm(gradients))


class Gradients(Hook):
    """What is left of them when a step has ended, and how they were clipped."""

    def __init__(self) -> None:
        self.clipped: list[torch.Tensor] = []
        self.left: list[Any] = []

    def on_before_optimizer_step(self, trainer: Trainer, step: int) -> None:
        self.clipped += [p.grad.clone() for p in trainer.model.parameters() if p.grad is not None]

    def on_train_batch_end(self, trainer: Trainer, step: int) -> None:
        self.left += [p.grad for p in trainer.model.parameters()]


def test_gradients_are_clipped_as_torch_clips_and_gone_after_the_step(tmp_path: Path) -> None:
    kept: list[torch.Tensor] = []

    class Unclipped(Hook):
        def on_before_optimizer_step(self, trainer: Trainer, step: int) -> None:
            parameters = list(trainer.model.parameters())
            torch.nn.utils.clip_grad_norm_(parameters, 0.1)
            kept.extend(p.grad.clone() for p in parameters if p.grad is not None)

    task, hook = Task(lambda: nn.Linear(4, 2), loss), Gradients()
    Trainer(task, config(tmp_path), [hook]).fit(data())
    Trainer(task, config(tmp_path, optimization={}), [Unclipped()]).fit(data())
    assert len(kept) == 6
    assert all(torch.equal(a, b) for a, b in zip(hook.clipped, kept, strict=True))
    assert hook.left == [None] * 6


def test_an_optimizers_own_zero_grad_is_called(tmp_path: Path) -> None:
    calls: list[bool] = []

    class Own(torch.optim.SGD):
        def zero_grad(self, set_to_none: bool = True) -> None:
            calls.append(set_to_none)
            super().zero_grad(set_to_none)

    task = Task(lambda: nn.Linear(4, 2), loss, lambda parameters, _: Own(parameters, lr=0.1))
    Trainer(task, config(tmp_path)).fit(data())
    assert calls == [True] * 3


def test_a_bad_micro_batch_is_named_by_its_own_samples(tmp_path: Path) -> None:
    """In the second step's third micro-batch of four."""
    seen: list[list[int]] = []

    def spoiled(model: nn.Module, batch: Any) -> torch.Tensor:
        seen.append(batch[0].int().tolist())
        found = loss(model, batch)
        return found * float("nan") if len(seen) == 7 else found

    with pytest.raises(NonFiniteLoss) as error:
        Trainer(Task(lambda: nn.Linear(4, 2), spoiled), config(tmp_path)).fit(data())
    assert f"samples {seen[6]}" in str(error.value)


def test_mean_times_cover_the_steps_since_the_last_call() -> None:
    recorder = Recorder(None)
    recorder.step(StepTimes(1, 0.0, 0.125, 0.5, 0.25, 0.0, 0.0, 0.0))
    recorder.step(StepTimes(2, 1.0, 0.375, 0.5, 0.75, 0.0, 0.5, 0.0, flags=1))
    means = recorder.take_mean_times()
    assert means["time/step_s"] == 1.5
    assert (means["time/data_wait_s"], means["time/communication_s"]) == (0.25, 0.5)
    assert (means["time/checkpoint_s"], means["time/other_s"]) == (0.25, 0.0)
    assert recorder.take_mean_times() == {}


def test_a_resumed_run_keeps_the_configs_implementation(tmp_path: Path) -> None:
    """How weights are gone through is the config's, not the checkpoint's: it may be another device.

    What belongs to the numbers (betas, weight decay) is the same in both, or refused.
    """
    task = Task(lambda: nn.Linear(4, 2), loss)
    first = config(tmp_path, checkpoint={"every_steps": 3}, optimization={"weight_decay": 0.25})
    begun = Trainer(task, first).fit(data())
    again = config(
        tmp_path,
        max_steps=6,
        checkpoint={"every_steps": None, "resume_from": str(begun.run_dir)},
        optimization={"weight_decay": 0.25, "adamw_implementation": "foreach"},
    )
    trainer = Trainer(task, again)
    assert len(trainer.fit(data()).steps) == 3
    assert trainer.assembly is not None
    group = trainer.assembly.engine.optimizer.param_groups[0]
    assert (group["foreach"], group["fused"], group["weight_decay"]) == (True, False, 0.25)
