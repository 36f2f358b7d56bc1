"""A small GPT with dropout and variable-length samples: the model of the parity tests."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

from drivetrain.train.task import Task, Total

VOCABULARY = 32
PAD = -100


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.head_size = width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # by heads first, so that tp ranks have whole heads, each with its q, k and v
        joint = self.qkv(self.norm1(x)).unflatten(-1, (-1, 3, self.head_size))
        q, k, v = joint.unbind(-2)
        attended = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        x = x + self.dropout(self.out(attended.transpose(1, 2).flatten(2)))
        out: torch.Tensor = x + self.dropout(self.mlp(self.norm2(x)))
        return out


class GPT(nn.Module):
    tp_plan: ClassVar[dict[str, str]] = {
        "blocks.*.qkv": "colwise",
        "blocks.*.out": "rowwise",
        "blocks.*.mlp.0": "colwise",
        "blocks.*.mlp.2": "rowwise",
        "head": "colwise_gather",
    }

    def __init__(self, width: int = 32, layers: int = 2, dropout: float = 0.1) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(32, width)
        self.blocks = nn.ModuleList([Block(width, 4, dropout) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids: torch.Tensor, position_ids: torch.Tensor | None = None) -> torch.Tensor:
        if position_ids is None:
            position_ids = torch.arange(ids.shape[1], device=ids.device)
        x = self.tokens(ids) + self.positions(position_ids)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


class Sentences(Dataset[torch.Tensor]):
    """Sequences of 3 to 20 tokens, each a short arithmetic progression with noise."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(index)
        size = int(torch.randint(3, 21, (1,), generator=generator))
        start, pace = torch.randint(1, VOCABULARY, (2,), generator=generator)
        sample: torch.Tensor = (start + pace * torch.arange(size)) % VOCABULARY
        return sample


def collate(samples: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(len(s) for s in samples)
    ids = torch.zeros(len(samples), longest, dtype=torch.long)
    targets = torch.full((len(samples), longest), PAD)
    for row, sample in enumerate(samples):
        ids[row, : len(sample)] = sample
        targets[row, : len(sample) - 1] = sample[1:]
    return ids, targets


def token_loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> Total:
    ids, targets = batch
    logits = model(ids)
    total = F.cross_entropy(
        logits.flatten(0, 1).float(), targets.flatten(), ignore_index=PAD, reduction="sum"
    )
    return Total(total, (targets != PAD).sum())


def wrong_mean_loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The classic mistake: a mean per micro-batch weighs tokens of short ones too much."""
    total = token_loss(model, batch)
    mean: torch.Tensor = total.sum / total.count
    return mean


def gpt_metrics(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, Total]:
    ids, targets = batch
    logits = model(ids)
    mask = targets != PAD
    loss = F.cross_entropy(
        logits.flatten(0, 1).float(), targets.flatten(), ignore_index=PAD, reduction="sum"
    )
    right = ((logits.argmax(-1) == targets) & mask).sum()
    return {"loss": Total(loss, mask.sum()), "accuracy": Total(right, mask.sum())}


def gpt_task(dropout: float = 0.1, width: int = 32, layers: int = 2) -> Task:
    return Task(model=lambda: GPT(width, layers, dropout), loss=token_loss, metrics=gpt_metrics)
