"""A small training whose every part can be changed between two attempts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from drivetrain.record import session
from drivetrain.record.session import ACCEPT_CHANGE, RUN_DIR
from drivetrain.train.optimization.optimizers import from_config
from drivetrain.train.task import Task
from drivetrain.train.trainer import Trainer

LENGTH, HALF, WHOLE = 24, 4, 8


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 2))


@dataclass(frozen=True)
class Setup:
    """What a user may have changed when the same command is started again."""

    config: Mapping[str, Any] = field(default_factory=dict)
    num_ranks: int = 1
    length: int = LENGTH
    shift: float = 0.0
    """Added to every sample: other data of the same length."""
    model: Callable[[], nn.Module] = _model
    optimizer: Any = from_config
    torch: str = torch.__version__
    """The version that is written down; there is but one to train with."""


def train(setup: Setup, run_dir: Path, steps: int, accepted: tuple[str, ...] = ()) -> list[float]:
    """Losses of the steps that this attempt has taken."""
    config = {
        "global_batch_size": 8,
        "micro_batch_size": 4,
        "max_steps": steps,
        "checkpoint": {"every_steps": 2, "asynchronous": False},
        "record": {"progress": "none", "sinks": []},
        **setup.config,
    }
    task = Task(model=setup.model, loss=_loss, optimizer=setup.optimizer)
    session._opened = 0  # each call stands for a process of its own
    with (
        patch.object(torch, "__version__", setup.torch),
        _environment({RUN_DIR: str(run_dir), ACCEPT_CHANGE: ",".join(accepted)}),
    ):
        return Trainer(task, config).fit(_data(setup)).losses


def _loss(model: nn.Module, batch: Any) -> torch.Tensor:
    inputs, labels = batch
    return functional.cross_entropy(model(inputs), labels)


def _data(setup: Setup) -> TensorDataset:
    inputs = torch.arange(setup.length * 4, dtype=torch.float32).reshape(-1, 4).sin()
    return TensorDataset(inputs + setup.shift, torch.arange(setup.length) % 2)


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
