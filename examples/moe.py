"""A small GPT with experts: each token goes to 2 of 8, on any rank.

python examples/moe.py
drivetrain train examples/moe.py --nproc-per-node 2 parallel.strategy=fsdp parallel.ep=2
drivetrain train examples/moe.py --nproc-per-node 4 parallel.strategy=fsdp parallel.ep=2

It is written for one device. Drivetrain recognizes the experts by the form of `Experts`.
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


class Experts(nn.Module):
    """All experts of a layer: one row of weights per expert, and tokens sorted by expert."""

    def __init__(self, num_experts: int, width: int, hidden: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.up = nn.Parameter(torch.empty(num_experts, hidden, width))
        self.down = nn.Parameter(torch.empty(num_experts, width, hidden))
        for weight in (self.up, self.down):
            nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        num_tokens, top_k = top_k_index.shape
        expert, order = top_k_index.flatten().sort(stable=True)
        counts = torch.zeros(self.num_experts, dtype=torch.int32, device=expert.device)
        counts.scatter_add_(0, expert, torch.ones_like(expert, dtype=torch.int32))
        ends = counts.cumsum(0, dtype=torch.int32)
        rows = hidden_states[order // top_k]
        rows = F.gelu(F.grouped_mm(rows, self.up.transpose(1, 2), offs=ends))
        rows = F.grouped_mm(rows, self.down.transpose(1, 2), offs=ends)
        rows = rows * top_k_weights.flatten()[order, None].to(rows.dtype)
        back = torch.empty_like(order).scatter_(
            0, order, torch.arange(order.numel(), device=order.device)
        )
        summed: torch.Tensor = rows[back].view(num_tokens, top_k, -1).sum(1)
        return summed


class MoE(nn.Module):
    """A router and its experts.

    Experts that get too few tokens are preferred slightly more from step to step: `balance` is
    called after each step with the number of tokens in the whole batch that each expert got.
    """

    bias: torch.Tensor

    def __init__(self, num_experts: int, top_k: int, width: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.router = nn.Linear(width, num_experts, bias=False)
        self.experts = Experts(num_experts, width, 2 * width)
        self.register_buffer("bias", torch.zeros(num_experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, -2)
        scores = self.router(tokens).float().sigmoid()
        _, chosen = (scores + self.bias).topk(self.top_k, dim=-1)
        weights = scores.gather(1, chosen)
        weights = weights / weights.sum(-1, keepdim=True)
        out: torch.Tensor = self.experts(tokens, chosen, weights)
        return out.view_as(x)

    def balance(self, load: torch.Tensor) -> None:
        self.bias += 1e-3 * (load.float().mean() - load).sign()


class Block(nn.Module):
    def __init__(self, width: int, heads: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.heads, self.head_size = heads, width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.moe = MoE(num_experts, top_k, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (-1, 3, self.head_size)).unbind(-2)
        attended = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        out: torch.Tensor = x + self.moe(self.norm2(x))
        return out


class GPT(nn.Module):
    tp_plan: ClassVar[dict[str, str]] = {
        "blocks.*.qkv": "colwise",
        "blocks.*.out": "rowwise",
        "head": "colwise_gather",
    }

    def __init__(
        self,
        width: int = 96,
        layers: int = 3,
        num_experts: int = 8,
        top_k: int = 2,
        vocabulary: int = 256,
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, 4, num_experts, top_k) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
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
    length = max(len(sample) for sample in samples)
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
            "name": "moe",
            "global_batch_size": 32,
            "micro_batch_size": 8,
            "max_steps": 100,
            "optimization": {"learning_rate": 2e-3, "warmup_steps": 10, "max_grad_norm": 1.0},
        }
    )
    Trainer(Task(GPT, loss), config).fit(DataLoader(Lines(), collate_fn=collate, shuffle=True))


if __name__ == "__main__":
    main()
