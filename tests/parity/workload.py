"""What the mutants are planted in: a small GPT with dropout, batch norm and uneven samples.

As a script it takes config words like any other: python tests/parity/workload.py
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from drivetrain.config.load import load_config
from drivetrain.train.task import Task, Total
from drivetrain.train.trainer import Trainer
from tests.gpt_task import GPT, PAD, VOCABULARY, Block, Sentences, collate

WIDTH = 32
SETTINGS: dict[str, Any] = {
    "global_batch_size": 12,
    "micro_batch_size": 3,
    "max_steps": 12,
    "optimization": {
        "learning_rate": 3e-3,
        "max_grad_norm": 1.0,
        "warmup_steps": 3,
        "weight_decay": 0.5,
        "lr_scheduler_type": "cosine",
    },
    "checkpoint": {"every_steps": None},
    "record": {"progress": "none", "sinks": [], "logging_steps": 1},
}


class Model(nn.Module):
    """Two blocks, and a batch norm before the head."""

    tp_plan = GPT.tp_plan

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(32, WIDTH)
        self.blocks = nn.ModuleList([Block(WIDTH, 4, dropout=0.1) for _ in range(2)])
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x.transpose(1, 2)).transpose(1, 2))
        return logits


def make_task() -> Task:
    return Task(model=Model, loss=loss)


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> Total:
    """Cross-entropy and, as in distillation, a log_softmax that no cross-entropy consumes."""
    ids, targets = batch
    logits = model(ids)
    total = F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=PAD, reduction="sum"
    )
    spread = -F.log_softmax(logits, dim=-1).sum() / VOCABULARY
    return Total(total + 0.1 * spread, (targets != PAD).sum())


def make_data() -> DataLoader[Any]:
    return DataLoader(Sentences(50), collate_fn=collate, shuffle=True)


if __name__ == "__main__":
    Trainer(make_task(), load_config(defaults=SETTINGS)).fit(make_data())
