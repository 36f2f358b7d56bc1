"""A loss may use the model's attributes, methods and parts: gradients are the global batch's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from drivetrain.core.errors import ConfigError
from drivetrain.testing import run_ranks
from drivetrain.train.task import Task
from drivetrain.train.trainer import Trainer
from tests.ranks.training import assert_same_training


class Classifier(nn.Module):
    """`dim` is DDP's, too."""

    def __init__(self) -> None:
        super().__init__()
        self.dim, self.num_classes = 8, 2
        self.encoder, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.head = nn.Linear(8, self.num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.norm(self.encoder(x)))
        return y

    def training_step(self, batch: Any) -> torch.Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def by_parts(self, batch: Any) -> torch.Tensor:
        return F.cross_entropy(self.head(self.norm(self.encoder(batch[0]))), batch[1])


class WithoutDim(Classifier):
    def __init__(self) -> None:
        super().__init__()
        del self.dim


def by_method(model: Any, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = model.training_step(batch)
    return loss


def by_parts(model: Any, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = model.by_parts(batch)
    return loss


def by_attributes(model: Any, batch: Any) -> torch.Tensor:
    assert model.dim == 8
    return by_num_classes(model, batch)


def by_num_classes(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]).view(-1, model.num_classes), batch[1])


def samples() -> TensorDataset:
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x[:, 0] > 0).long())


def train(folder: str, loss: Any, model: Any = Classifier, **parallel: Any) -> list[float]:
    config = {
        "global_batch_size": 16,
        "micro_batch_size": 4,
        "max_steps": 5,
        "output_dir": folder,
        "parallel": parallel,
        "optimization": {"learning_rate": 0.05},
        "record": {"progress": "none", "sinks": []},
    }
    return Trainer(Task(model, loss), config).fit(samples()).losses


def everything(folder: str) -> list[list[float]]:
    found = [train(folder, loss) for loss in (by_method, by_parts, by_attributes)]
    found += [train(folder, loss, strategy="fsdp") for loss in (by_method, by_attributes)]
    static = {"static_graph": True}
    found.append(train(folder, by_num_classes, WithoutDim, ddp=static))
    with pytest.raises(ConfigError, match="model.by_parts would run outside the static graph"):
        train(folder, by_parts, WithoutDim, ddp=static)
    with pytest.raises(ConfigError, match="DDP itself has an attribute called dim"):
        train(folder, by_attributes, ddp=static)
    with pytest.raises(RuntimeError) as caught:
        train(folder, by_parts, strategy="fsdp")
    assert "under fsdp a model's weights are gathered when" in caught.value.__notes__[0]
    return found


def test_what_is_computed_past_forward_is_averaged_too(tmp_path: Path) -> None:
    """With two micro-batches a step on each rank, and a graph that DDP takes for static."""
    expected = train(str(tmp_path), by_attributes)
    for found in run_ranks(everything, 2, 120, args=(str(tmp_path),)):
        for losses in found:
            assert_same_training(losses, expected)
