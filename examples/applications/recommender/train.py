r"""Who clicks on what: large tables of which a step touches a few rows, on generated clicks.

drivetrain train --nproc-per-node 2 examples/applications/recommender/train.py
drivetrain train --nproc-per-node 2 examples/applications/recommender/train.py \
    parallel.strategy=parameter_server parallel.parameter_server.sparse_rows=true
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

from drivetrain import PerSample, Task, Trainer, load_config

USERS, ITEMS, FACTORS = 10_000, 2_000, 4
TRAINED, VALIDATED = 400_000, 20_000


class Clicks(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """A user is shown an item; whether they click follows from tastes that nobody sees.

    Few items are shown often and most hardly ever, as on any site.
    """

    def __init__(self, seed: int, size: int) -> None:
        tastes = torch.Generator().manual_seed(0)
        users = torch.randn(USERS, FACTORS, generator=tastes)
        items = torch.randn(ITEMS, FACTORS, generator=tastes)
        liked = torch.randn(ITEMS, generator=tastes)
        drawn = torch.Generator().manual_seed(seed)
        who = (USERS * torch.rand(size, generator=drawn) ** 3).long()
        what = (ITEMS * torch.rand(size, generator=drawn) ** 3).long()
        score = (users[who] * items[what]).sum(1) + liked[what] - 1
        self.pairs = torch.stack((who, what), 1)
        self.clicks = torch.bernoulli(score.sigmoid(), generator=drawn)

    def __len__(self) -> int:
        return len(self.clicks)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.pairs[index], self.clicks[index]


class TwoTables(nn.Module):
    """A vector and a leaning for every user and every item."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(USERS, width), nn.Embedding(ITEMS, width)
        self.leanings = nn.Embedding(ITEMS, 1)
        for table in (self.users, self.items):
            nn.init.normal_(table.weight, std=0.1)
        nn.init.zeros_(self.leanings.weight)

    def forward(self, pairs: torch.Tensor) -> torch.Tensor:
        who, what = pairs.unbind(1)
        likeness = (self.users(who) * self.items(what)).sum(1)
        logits: torch.Tensor = likeness + self.leanings(what).squeeze(1)
        return logits


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    pairs, clicks = batch
    return F.binary_cross_entropy_with_logits(model(pairs), clicks)


def metrics(model: nn.Module, batch: Any) -> dict[str, Any]:
    pairs, clicks = batch
    logits = model(pairs)
    own = F.binary_cross_entropy_with_logits(logits, clicks)
    return {"loss": own, "score": PerSample(logits), "click": PerSample(clicks)}


def auroc(samples: dict[str, Any]) -> dict[str, float]:
    """How often a click has a higher score than no click: exact, over all samples of all ranks."""
    ranks = samples["score"].argsort().argsort().double() + 1
    is_click = samples["click"].bool()
    num, others = is_click.sum(), (~is_click).sum()
    area = (ranks[is_click].sum() - num * (num + 1) / 2) / (num * others)
    return {"auroc": area.item()}


def main() -> None:
    config = load_config(
        defaults={
            "name": "recommender",
            "global_batch_size": 1024,
            "num_train_epochs": 3,
            # plain SGD moves the rows of the batch and no others: that is what sparse_rows lives on
            "optimization": {
                "optimizer": "sgd",
                "learning_rate": 100.0,
                "lr_scheduler_type": "linear",
            },
            "evaluation": {"batch_size": 2000},
            "record": {"logging_steps": 50},
        }
    )
    task = Task(TwoTables, loss, metrics=metrics, summarize=auroc)
    Trainer(task, config).fit(Clicks(1, TRAINED), Clicks(2, VALIDATED))


if __name__ == "__main__":
    main()
