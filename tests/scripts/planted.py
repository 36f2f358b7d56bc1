"""A small training with one mistake in it, chosen by the first word: what a rehearsal must find."""

from __future__ import annotations

import sys
from typing import ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

from drivetrain import Task, Trainer, load_config

PLANT = sys.argv[1]
COUNT = 6 if PLANT == "heads" else 8  # attention heads, by a name that nobody looks for
WIDTH, LENGTH = 12 * COUNT, 32
VOCABULARY = 4096 if PLANT == "memory" else 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        joint = self.qkv(self.norm(x))
        q, k, v = joint.unflatten(-1, (-1, 3, 12)).unbind(-2)  # HERE: heads
        attended = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        return x + self.out(attended.transpose(1, 2).flatten(2))


class Model(nn.Module):
    tp_plan: ClassVar[dict[str, str]] = {"blocks.*.qkv": "colwise", "blocks.*.out": "rowwise"}

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        if PLANT == "gradient":
            self.forgotten = nn.Linear(WIDTH, WIDTH)  # HERE: gradient
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)  # HERE: ids
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # HERE: memory


class Tokens(Dataset):
    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> torch.Tensor:
        top = VOCABULARY + 1 if PLANT == "ids" else VOCABULARY
        sample = torch.full((LENGTH,), top - 1)
        sample[: LENGTH // 2] = index % VOCABULARY
        return sample


def loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    logits = model(ids)
    targets = ids[:, 1:]
    if PLANT != "batch":
        logits = logits[:, :-1]
    mean = F.cross_entropy(logits.flatten(0, 1), targets.flatten())  # HERE: batch
    if PLANT == "unequal" and dist.get_rank() == 0:
        dist.all_reduce(mean.detach().clone().expand(7).contiguous())  # HERE: unequal
    if PLANT == "item" and mean.item() > 100:  # HERE: item
        raise ValueError("diverged")
    return mean


if __name__ == "__main__":
    config = load_config(
        argv=sys.argv[2:],
        defaults={
            "global_batch_size": 64,
            "micro_batch_size": 2,
            "max_steps": 5,
            "optimization": {"max_grad_norm": 1.0},
            "record": {"progress": "none", "sinks": []},
        },
    )
    Trainer(Task(Model, loss), config).fit(Tokens())  # HERE: stage
