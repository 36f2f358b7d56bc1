"""A loss over the rows of all ranks is the loss of one process with the whole batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import drivetrain
from drivetrain.testing import run_ranks
from drivetrain.train.task import Task, Total
from drivetrain.train.trainer import Trainer
from tests.ranks.training import assert_same_training

NUM_SAMPLES, NUM_VAL = 21, 7


def pairs(length: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(length, 8, generator=generator)
    return TensorDataset(images, images @ torch.randn(8, 6, generator=generator))


class Clip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.images, self.texts = nn.Linear(8, 16), nn.Linear(6, 16)
        self.scale = nn.Parameter(torch.tensor([2.0]))

    def forward(self, image: torch.Tensor, text: torch.Tensor) -> tuple[torch.Tensor, ...]:
        images = F.normalize(self.images(image), dim=-1)
        return images, F.normalize(self.texts(text), dim=-1), self.scale.exp()


def clip_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    images, texts, scale = model(*batch)
    logits = scale * drivetrain.gather(images) @ drivetrain.gather(texts).T
    own = torch.arange(len(logits), device=logits.device)
    return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2


def local_loss(model: nn.Module, batch: Any) -> Total:
    """As open_clip's local_loss: this rank's rows against all."""
    images, texts, scale = model(*batch)
    ids = drivetrain.gather(batch[0])
    own = (batch[0][:, None] == ids).all(-1).float().argmax(1)
    logits = scale * images @ drivetrain.gather(texts).T
    return Total(F.cross_entropy(logits, own, reduction="sum"), len(own))


def settings(folder: str, strategy: str, **more: Any) -> dict[str, Any]:
    """21 samples in batches of 8: of the last, two micro-batches have 3 and 2."""
    return {
        "global_batch_size": 8,
        "max_steps": 6,
        "output_dir": folder,
        "parallel": {"strategy": strategy},
        "optimization": {"learning_rate": 1e-2, "max_grad_norm": 1.0},
        "record": {"progress": "none", "sinks": [], "logging_steps": 1},
        "evaluation": {"batch_size": 4},
        **more,
    }


def train(folder: str, strategy: str, loss: Any = clip_loss, **more: Any) -> list[float]:
    trainer = Trainer(Task(Clip, loss), settings(folder, strategy, **more))
    history = trainer.fit(pairs(NUM_SAMPLES), pairs(NUM_VAL))
    norms = [float(step.grad_norm or 0.0) for step in history.steps]
    return [*history.losses, *norms, history.evaluations[-1].metrics["loss"]]


def train_own_loop(folder: str, strategy: str, **more: Any) -> list[float]:
    loop = drivetrain.prepare(Clip, None, pairs(NUM_SAMPLES), settings(folder, strategy, **more))
    for step in loop.steps():
        for batch in step:
            loop.backward(clip_loss(loop.model, batch))
        loop.step()
    return loop.history.losses


def everything(folder: str, micro_batch_size: int) -> dict[str, list[float]]:
    more = {"micro_batch_size": micro_batch_size}
    return {
        "ddp": train(folder, "ddp", **more),
        "fsdp": train(folder, "fsdp", **more),
        "own rows": train(folder, "ddp", local_loss, **more),
        "own loop": train_own_loop(folder, "fsdp", **more),
    }


def test_the_numbers_are_those_of_one_process(tmp_path: Path) -> None:
    """Three ranks with two micro-batches: one of them has no samples, and adds no rows."""
    folder = str(tmp_path)
    expected = everything(folder, 8)
    assert_same_training(expected["own loop"], expected["ddp"][:6])
    for found in run_ranks(everything, 3, 120, args=(folder, 4)):
        for name, numbers in found.items():
            assert_same_training(numbers, expected[name])


def test_accumulation_is_refused_unless_it_is_allowed(tmp_path: Path) -> None:
    """On one process as on many."""
    with pytest.raises(drivetrain.ConfigError, match=r"several micro-batches.*allow_accumulation"):
        train(str(tmp_path), "ddp", micro_batch_size=4)

    def allowed(model: nn.Module, batch: Any) -> torch.Tensor:
        rows = drivetrain.gather(model(*batch)[0], allow_accumulation=True)
        assert len(rows) == len(batch[0])
        return rows.mean()

    train(str(tmp_path), "ddp", allowed, micro_batch_size=4)


@pytest.mark.parametrize(
    ("key", "more"),
    [
        ("reproducibility", {"reproducibility": "bitwise", "micro_batch_size": 8}),
        ("parallel.strategy", {"parallel": {"strategy": "local_sgd"}}),
    ],
)
def test_where_it_has_no_meaning_it_is_refused(
    tmp_path: Path, key: str, more: dict[str, Any]
) -> None:
    with pytest.raises(drivetrain.ConfigError, match=rf"{key} = .*gather\(\) cannot be used"):
        train(str(tmp_path), "ddp", **more)


def outside() -> str:
    with pytest.raises(RuntimeError) as caught:
        drivetrain.gather(torch.ones(2))
    return str(caught.value)


def test_outside_of_a_loss(tmp_path: Path) -> None:
    """A process alone has all rows; several would go on with their own, and nobody would know."""
    rows = torch.ones(3)
    assert drivetrain.gather(rows) is rows
    with pytest.raises(drivetrain.ConfigError, match="no rows"):
        drivetrain.gather(torch.tensor(1.0))
    assert (
        run_ranks(outside, 2, 60)
        == ["call gather() inside a loss: Task.loss, or `for batch in step`"] * 2
    )
