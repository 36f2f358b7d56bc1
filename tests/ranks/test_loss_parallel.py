"""With parallel.tensor.loss_parallel any loss trains what it trains on one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from drivetrain.core.errors import ConfigError
from drivetrain.testing import run_ranks
from drivetrain.train.task import Task
from drivetrain.train.trainer import Trainer
from tests.gpt_task import GPT, PAD, VOCABULARY, token_loss
from tests.ranks.training import largest_deviation, sentences, settings

Batch = tuple[torch.Tensor, torch.Tensor]
_TOLERANCE = 1e-5
"""As the parity matrix: sums over parts of the vocabulary are rounded otherwise."""


def cross_entropy(model: nn.Module, batch: Batch) -> torch.Tensor:
    ids, targets = batch
    return F.cross_entropy(model(ids).view(-1, VOCABULARY), targets.flatten(), ignore_index=PAD)


def shifted(model: nn.Module, batch: Batch) -> torch.Tensor:
    ids, _ = batch
    return F.cross_entropy(model(ids)[:, :-1].transpose(1, 2).float(), ids[:, 1:])


def each_token(model: nn.Module, batch: Batch) -> torch.Tensor:
    ids, targets = batch
    losses = F.cross_entropy(
        model(ids).flatten(0, 1), targets.flatten(), ignore_index=PAD, reduction="none"
    )
    return (losses * torch.linspace(0.5, 1.5, len(losses))).mean()


def smoothed(model: nn.Module, batch: Batch) -> torch.Tensor:
    ids, targets = batch
    return F.cross_entropy(
        model(ids).flatten(0, 1), targets.flatten(), ignore_index=PAD, label_smoothing=0.1
    )


def distilled(model: nn.Module, batch: Batch) -> torch.Tensor:
    ids, _ = batch
    generator = torch.Generator().manual_seed(int(ids.sum()))
    teacher = torch.randn(*ids.shape, VOCABULARY, generator=generator).softmax(-1)
    return F.kl_div(F.log_softmax(model(ids) / 2, -1), teacher, reduction="batchmean")


def with_z_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    ids, targets = batch
    logits = model(ids)
    z = torch.logsumexp(logits, -1).square().mean()
    own = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=PAD)
    return own + 0.01 * z - 0.01 * F.log_softmax(logits, dim=-1).mean()


def chosen_tokens(model: nn.Module, batch: Batch) -> torch.Tensor:
    """As policy gradients have it."""
    ids, _ = batch
    chosen: torch.Tensor = model(ids).log_softmax(-1).gather(-1, ids[..., None])
    return -chosen.mean()


LOSSES: tuple[Callable[[nn.Module, Any], Any], ...] = (
    token_loss,
    cross_entropy,
    shifted,
    each_token,
    smoothed,
    distilled,
    with_z_loss,
    chosen_tokens,
)


def train(output_dir: str, loss: Callable[[nn.Module, Any], Any], tp: int) -> list[float]:
    parallel = {"tp": tp, "tensor": {"loss_parallel": True}}
    optimization = {"learning_rate": 3e-3}
    config = settings(output_dir, max_steps=3, parallel=parallel, optimization=optimization)
    config |= {"global_batch_size": 6, "checkpoint": {"every_steps": None}}
    return Trainer(Task(model=lambda: GPT(dropout=0.0), loss=loss), config).fit(sentences()).losses


def train_all(output_dir: str) -> tuple[dict[str, list[float]], list[str]]:
    losses = {loss.__name__: train(output_dir, loss, 2) for loss in LOSSES}
    refused = []
    for loss in (scaled_in_place, masked_in_place):
        try:
            train(output_dir, loss, 2)
        except ConfigError as error:
            refused.append(str(error))
    return losses, refused


def scaled_in_place(model: nn.Module, batch: Batch) -> torch.Tensor:
    ids, targets = batch
    logits = model(ids)
    logits.div_(2.0)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=PAD)


def masked_in_place(model: nn.Module, batch: Batch) -> torch.Tensor:
    ids, targets = batch
    logits = model(ids)
    logits[..., 0] = -1e9
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=PAD)


@pytest.mark.slow
def test_every_loss_trains_what_one_process_trains(tmp_path: Path) -> None:
    expected = {loss.__name__: train(str(tmp_path), loss, 1) for loss in LOSSES}
    for losses, refused in run_ranks(train_all, 2, 120, args=(str(tmp_path),)):
        parts = {name: largest_deviation(found, expected[name]) for name, found in losses.items()}
        assert {n: d for n, d in parts.items() if d > _TOLERANCE} == {}
        assert len(refused) == 2
        assert "changes the logits in place (div_)" in refused[0]
        assert "changes the logits in place (__setitem__)" in refused[1]
