"""What the arms of a benchmark train: the same model, data and settings for each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, TensorDataset

LEARNING_RATE, MAX_GRAD_NORM = 1e-3, 1.0


@dataclass(frozen=True)
class Workload:
    """One training to be timed, and in what portions."""

    name: str
    model: Callable[[], nn.Module]
    dataset: Callable[[], Dataset[tuple[torch.Tensor, ...]]]
    batch_size: int
    """Per rank."""
    steps_per_block: int

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        """Cross-entropy over the last dimension of whatever the model gives."""
        inputs, targets = batch
        return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


class Decoder(nn.Module):
    """A plain transformer, so that a step takes a time worth comparing."""

    def __init__(self, width: int, layers: int, vocabulary: int = 512) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits for each position."""
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        logits: torch.Tensor = self.head(hidden)
        return logits


def _points() -> Dataset[tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(65_536, 8, generator=generator),
        torch.randint(0, 2, (65_536,), generator=generator),
    )


def _tokens() -> Dataset[tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 512, (4096, 65), generator=generator)
    return TensorDataset(tokens[:, :-1], tokens[:, 1:])


def near_empty() -> Workload:
    """Next to no work: what is left is the fixed cost of a step."""
    return Workload("near-empty", lambda: nn.Linear(8, 2), _points, 4, steps_per_block=40)


def transformer() -> Workload:
    """A step of more than 50 ms on one CPU core."""
    return Workload("transformer", lambda: Decoder(192, 4), _tokens, 8, steps_per_block=2)


def small_transformer() -> Workload:
    """A step of a few milliseconds: what is added to it shows before the machine's own noise."""
    return Workload("small", lambda: Decoder(32, 2), _tokens, 1, steps_per_block=10)
