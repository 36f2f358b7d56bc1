"""A small GPT on the bytes of Python's standard library: lines of any length.

python examples/gpt.py
drivetrain train examples/gpt.py --nproc-per-node 2
drivetrain train examples/gpt.py --nproc-per-node 4 parallel.strategy=fsdp
drivetrain train examples/gpt.py --nproc-per-node 4 parallel.strategy=fsdp parallel.tp=2
drivetrain train examples/gpt.py --nproc-per-node 2 parallel.pp=2
"""

from __future__ import annotations

import argparse as _argparse
import inspect
import statistics as _statistics
import textwrap as _textwrap
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

from drivetrain import Task, Total, Trainer, load_config

CONTEXT, PADDING = 96, -100


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.head_size = heads, width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # heads come first, so that a tensor-parallel rank gets whole heads with their q, k and v
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (-1, 3, self.head_size)).unbind(-2)
        attended = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        x = x + self.dropout(self.out(attended.transpose(1, 2).flatten(2)))
        out: torch.Tensor = x + self.dropout(self.mlp(self.norm2(x)))
        return out


class GPT(nn.Module):
    # how to shard each layer (parallel.tp): by outputs, then by inputs with summed results
    tp_plan: ClassVar[dict[str, str]] = {
        "blocks.*.qkv": "colwise",
        "blocks.*.out": "rowwise",
        "blocks.*.mlp.0": "colwise",
        "blocks.*.mlp.2": "rowwise",
        "head": "colwise_gather",
    }

    def __init__(self, width: int = 96, layers: int = 3, dropout: float = 0.1) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, 4, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, ids: torch.Tensor, position_ids: torch.Tensor | None = None) -> torch.Tensor:
        if position_ids is None:  # passed if a rank has only a part of the sequence (parallel.cp)
            position_ids = torch.arange(ids.shape[1], device=ids.device)
        x = self.tokens(ids) + self.positions(position_ids)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


class Lines(Dataset[torch.Tensor]):
    """Each sample is a line of source code as bytes; lengths differ."""

    def __init__(self) -> None:
        text = "".join(inspect.getsource(m) for m in (_argparse, _statistics, _textwrap))
        self.lines = [line.encode()[:CONTEXT] for line in text.splitlines(keepends=True)]
        self.lines = [line for line in self.lines if len(line) > 8]

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(list(self.lines[index]))


def collate(samples: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    # pad to a multiple of 4 so that ranks can split a sequence (parallel.cp); the loss is the same
    length = -(-max(len(sample) for sample in samples) // 4) * 4
    ids = torch.zeros(len(samples), length, dtype=torch.long)
    targets = torch.full((len(samples), length), PADDING)
    for row, sample in enumerate(samples):
        ids[row, : len(sample)] = sample
        targets[row, : len(sample) - 1] = sample[1:]
    return ids, targets


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> Total:
    ids, targets = batch
    total = F.cross_entropy(
        model(ids).flatten(0, 1), targets.flatten(), ignore_index=PADDING, reduction="sum"
    )
    return Total(total, (targets != PADDING).sum())


def main() -> None:
    config = load_config(
        defaults={
            "name": "gpt",
            "global_batch_size": 32,
            "micro_batch_size": 8,
            "max_steps": 150,
            "optimization": {
                "learning_rate": 2e-3,
                "lr_scheduler_type": "cosine",
                "warmup_steps": 10,
                "max_grad_norm": 1.0,
            },
            "evaluation": {"every_steps": 75, "batch_size": 32},
        }
    )
    lines = Lines()
    train, val = torch.utils.data.random_split(
        lines, [0.9, 0.1], generator=torch.Generator().manual_seed(0)
    )
    Trainer(Task(GPT, loss), config).fit(
        DataLoader(train, collate_fn=collate, shuffle=True), DataLoader(val, collate_fn=collate)
    )


if __name__ == "__main__":
    main()
