"""The training of every arm: a small decoder on generated tokens, computed or emulated."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

from drivetrain.scaling.request import ScalingRequest, Setting

VOCABULARY, _POOL, _SEED, LEARNING_RATE = 128, 4096, 1234, 0.05


class _Wait(torch.autograd.Function):
    """The identity with a delay: a third of it in forward, two thirds in backward."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds / 3)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(2 * ctx.seconds / 3)
        return gradients[0], None


class WaitingLayer(nn.Module):
    """As many weights as a transformer layer; almost no compute, and a delay in its place."""

    def __init__(self, width: int, wait_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(12 * width, width))
        nn.init.normal_(self.weight, std=0.02)
        self.width, self.wait_s = width, wait_s

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        after = hidden + F.linear(hidden, self.weight[: self.width])
        if not self.wait_s:
            return after
        waited: torch.Tensor = _Wait.apply(after, self.wait_s)  # type: ignore[no-untyped-call]
        return waited


def _transformer_layer(width: int) -> nn.Module:
    return nn.TransformerEncoderLayer(
        width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
    )


class Decoder(nn.Module):
    """A decoder: embedding, layers, head."""

    def __init__(self, width: int, layers: list[nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        logits: torch.Tensor = self.head(hidden)
        return logits


class Tokens(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """As many samples as the steps need, from a fixed pool that repeats."""

    def __init__(self, number: int, length: int) -> None:
        generator = torch.Generator().manual_seed(_SEED)
        self._pool = torch.randint(0, VOCABULARY, (_POOL, length + 1), generator=generator)
        self._number = number

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not 0 <= index < self._number:
            raise IndexError(index)
        row = self._pool[index % _POOL]
        return row[:-1], row[1:]


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


@dataclass(frozen=True)
class Workload:
    """The training of one setting, the same for every arm."""

    asked: ScalingRequest
    setting: Setting

    @property
    def num_steps(self) -> int:
        """One warm-up block, then one block per round."""
        return self.asked.steps_per_block * (self.asked.rounds + 1)

    @property
    def wait_s(self) -> float:
        return (self.asked.emulate_compute_ms or 0.0) / 1e3 * self.setting.share

    def model(self, *, waits: bool = True) -> nn.Module:
        """Return a model with the same weights each time; other random states are unchanged."""
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(_SEED)
            width, number = self.asked.width, self.asked.layers
            if self.asked.emulate_compute_ms is None:
                return Decoder(width, [_transformer_layer(width) for _ in range(number)])
            each_s = self.wait_s / number if waits else 0.0
            return Decoder(width, [WaitingLayer(width, each_s) for _ in range(number)])

    def dataset(self) -> Tokens:
        return Tokens(self.num_steps * self.setting.global_batch, self.asked.sequence_length)

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=LEARNING_RATE)

    def batches(self, rank: int, device: torch.device) -> Iterator[list[torch.Tensor]]:
        """Yield this rank's batches, from torch's DistributedSampler without shuffling."""
        from torch.utils.data import DataLoader, DistributedSampler

        data = self.dataset()
        sampler: DistributedSampler[Any] = DistributedSampler(
            data, self.setting.num_ranks, rank, shuffle=False
        )
        for batch in DataLoader(data, self.setting.rank_batch, sampler=sampler):
            yield [tensor.to(device, non_blocking=True) for tensor in batch]

    def losses_of_one_process(self, device: torch.device, num_steps: int) -> list[float]:
        """Return losses of plain torch on each step's whole batch, in pieces of one rank's size."""
        model = self.model(waits=False).to(device)
        optimizer = self.optimizer(model.parameters())
        data, size, found = self.dataset(), self.setting.rank_batch, []
        pieces = self.setting.num_ranks
        for step in range(num_steps):
            total = 0.0
            optimizer.zero_grad()
            for piece in range(pieces):
                first = step * self.setting.global_batch + piece * size
                rows = [data[index] for index in range(first, first + size)]
                batch = [torch.stack(column).to(device) for column in zip(*rows, strict=True)]
                loss = loss_of(model, batch) / pieces
                loss.backward()
                total += float(loss.detach())
            optimizer.step()
            found.append(total)
        return found
