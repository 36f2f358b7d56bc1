r"""A GPT from scratch on the kernel's documentation.

python examples/applications/language/prepare.py
drivetrain train --nproc-per-node 2 examples/applications/language/train.py
drivetrain train --nproc-per-node 2 examples/applications/language/train.py \
    parallel.strategy=fsdp optimization.optimizer=muon
"""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

from drivetrain import History, Task, Total, Trainer, load_config

DATA = Path(os.environ.get("DATA", "data/kernel-docs"))
CONTEXT, VOCABULARY, END, IGNORED = 256, 4096, 0, -100


class Packed(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Windows over documents that lie end to end; what follows an END is not predicted from it."""

    def __init__(
        self, name: str, folder: Path = DATA, length: int = CONTEXT, end: int = END
    ) -> None:
        self.tokens = np.load(folder / f"{name}.npy", mmap_mode="r")
        self.length, self.end = length, end

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = index * self.length
        window = torch.from_numpy(self.tokens[start : start + self.length + 1].astype(np.int64))
        ids, targets = window[:-1], window[1:]
        return ids, targets.masked_fill(ids == self.end, IGNORED)


def same_document(ids: torch.Tensor) -> torch.Tensor:
    """Which position may look at which: earlier ones of its own document."""
    ends = (ids == END).long()
    document = ends.cumsum(1) - ends  # an END belongs to what it ends
    alike = document[:, :, None] == document[:, None, :]
    return alike.tril()[:, None]


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions, over the last two dimensions."""
    length, size = x.shape[-2:]
    rates = 10_000.0 ** (-torch.arange(0, size, 2, device=x.device) / size)
    angles = torch.arange(length, device=x.device)[:, None] * rates
    even, odd = x[..., 0::2], x[..., 1::2]
    turned = (even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos())
    return torch.stack(turned, -1).flatten(-2)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            each.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for each in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(rotate(q), rotate(k), v, attn_mask=mask)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        out: torch.Tensor = x + self.down(F.relu(self.up(self.norm2(x))).square())
        return out


class GPT(nn.Module):
    def __init__(self, width: int = 192, layers: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x, mask = self.tokens(ids), same_document(ids)
        for block in self.blocks:
            x = block(x, mask)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def loss(model: nn.Module, batch: Any) -> Total:
    """Over all predicted tokens of the global batch, wherever they are."""
    ids, targets = batch
    total = F.cross_entropy(
        model(ids).flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return Total(total, (targets != IGNORED).sum())


def train(argv: list[str]) -> History:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=CONTEXT, help="tokens in a sample")
    asked, words = parser.parse_known_args(argv)
    config = load_config(
        argv=words,
        defaults={
            "name": "kernel-docs",
            "global_batch_size": 16,
            "micro_batch_size": 8,
            "max_steps": 100,
            "optimization": {
                "learning_rate": 3e-3,
                "lr_scheduler_type": "wsd",
                "warmup_steps": 10,
                "decay_steps": 30,
                "weight_decay": 0.1,
                "max_grad_norm": 1.0,
            },
            "evaluation": {"every_steps": 25, "batch_size": 16, "max_samples": 128},
        },
    )
    model = partial(GPT, asked.width, asked.layers, asked.heads)
    data = [Packed(name, DATA, asked.context) for name in ("train", "val")]
    return Trainer(Task(model, loss), config).fit(*data)


def main() -> None:
    if not (DATA / "train.npy").exists():
        raise SystemExit(f"{DATA} has no tokens: python {Path(__file__).with_name('prepare.py')}")
    train(sys.argv[1:])


if __name__ == "__main__":
    main()
