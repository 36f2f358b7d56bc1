"""A drill's default script: a small transformer that records the samples it has seen.

It takes config overrides like any script: python -m drivetrain.verify.drills.workload
"""

from __future__ import annotations

import os
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from drivetrain.config.load import load_config
from drivetrain.train.task import Task
from drivetrain.train.trainer import Trainer
from drivetrain.verify.drills.hooks import SEEN

NUM_SAMPLES, LENGTH, TOKENS, WIDTH = 96, 12, 29, 32
_PAUSE_S = float(os.environ.get("DRIVETRAIN_DRILL_PAUSE_S", "0.002"))
"""Per micro-batch, so that there is time to inject faults."""


class Block(nn.Module):
    """Attention and a perceptron, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, dropout=0.1, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:

        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        out: torch.Tensor = x + self.mlp(self.norm2(x))
        return out


def make_model() -> nn.Module:
    """Two blocks, so that fsdp has something to shard."""
    blocks = [Block() for _ in range(2)]
    return nn.Sequential(nn.Embedding(TOKENS, WIDTH), *blocks, nn.Linear(WIDTH, TOKENS))


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Predict the next token, and record the sample ids."""
    ids, tokens = batch
    SEEN.extend(ids.tolist())
    time.sleep(_PAUSE_S)
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def main() -> None:
    config = load_config(
        defaults={
            "global_batch_size": 24,
            "micro_batch_size": 2,
            "max_steps": 30,
            "optimization": {"learning_rate": 3e-3, "max_grad_norm": 1.0},
            "checkpoint": {"every_steps": 5, "keep_last": 3},
            "record": {"progress": "none", "sinks": []},
        }
    )
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, TOKENS, (NUM_SAMPLES, LENGTH), generator=generator)
    data = TensorDataset(torch.arange(NUM_SAMPLES), tokens)
    Trainer(Task(make_model, loss), config).fit(data)


if __name__ == "__main__":
    main()
