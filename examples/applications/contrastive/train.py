r"""Pictures and their captions in one space, every pair against the whole batch of all ranks.

drivetrain train --nproc-per-node 2 examples/applications/contrastive/train.py
drivetrain train --nproc-per-node 2 examples/applications/contrastive/train.py --negatives own
"""

from __future__ import annotations

import argparse
import gzip
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

from drivetrain import Task, Total, Trainer, gather, load_config

DATA = Path("/usr/share/datasets/fashion-mnist")
NAMES = (
    "t-shirt top", "trousers", "pullover", "dress", "coat",
    "sandal", "shirt", "sneaker", "bag", "ankle boot",
)  # fmt: skip
SHADES, PLACES = ("dark", "grey", "bright"), ("left", "middle", "right")
WORDS = ("", *sorted({word for text in (*NAMES, *SHADES, *PLACES) for word in text.split()}))
CAPTION = 4


def caption(label: int, shade: int, place: int) -> list[int]:
    """The words' numbers, filled up with 0."""
    text = f"{NAMES[label]} {SHADES[shade]} {PLACES[place]}".split()
    ids = [WORDS.index(word) for word in text]
    return [*ids, *[0] * (CAPTION - len(ids))]


ALL_CAPTIONS = [
    caption(label, shade, place) for label in range(10) for shade in range(3) for place in range(3)
]


def read_idx(name: str) -> torch.Tensor:
    """The bytes behind the header, whose fourth byte says how many sizes it has."""
    data = gzip.decompress((DATA / f"{name}.gz").read_bytes())
    return torch.from_numpy(np.frombuffer(data, np.uint8, offset=4 + 4 * data[3]).copy())


class Captioned(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """A picture, dimmed and moved by its number, and the words for what it shows."""

    def __init__(self, part: str, num_samples: int) -> None:
        self.images = read_idx(f"{part}-images-idx3-ubyte").reshape(-1, 28, 28)[:num_samples]
        self.labels = read_idx(f"{part}-labels-idx1-ubyte")[:num_samples].tolist()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        shade, place = index % 3, index // 3 % 3
        image = self.images[index].float() / 255 * (0.3, 0.6, 1.0)[shade]
        image = F.pad(image, ((0, 8), (4, 4), (8, 0))[place])
        return image[None], torch.tensor(caption(self.labels[index], shade, place))


class TwoTowers(nn.Module):
    """Both towers end on one sphere; the scale says how sharp likeness counts."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.picture = nn.Sequential(
            nn.Conv2d(1, 16, 5, 2, 2), nn.ReLU(),
            nn.Conv2d(16, 32, 5, 2, 2), nn.ReLU(),
            nn.Flatten(), nn.Linear(32 * 7 * 9, width),
        )  # fmt: skip
        self.words = nn.EmbeddingBag(len(WORDS), width, mode="sum", padding_idx=0)
        self.caption = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
        self.scale = nn.Parameter(torch.tensor([2.0]))  # of one dimension, for fsdp

    def forward(self, images: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        pictures = F.normalize(self.picture(images))
        captions = F.normalize(self.caption(self.words(ids)))
        return pictures, captions, self.scale.exp()


def loss_over_all(model: nn.Module, batch: Any) -> torch.Tensor:
    """Every rank sees the pairs of all ranks: the loss of one process, whatever their number."""
    pictures, captions, scale = model(*batch)
    return contrast(gather(pictures), gather(captions), scale)


def loss_over_own(model: nn.Module, batch: Any) -> torch.Tensor:
    """The usual mistake: only the pairs of the rank's own share of the batch."""
    return contrast(*model(*batch))


def contrast(pictures: torch.Tensor, captions: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Which caption to this picture, and which picture to this caption?"""
    logits = scale * pictures @ captions.T
    own = torch.arange(len(logits), device=logits.device)
    return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2


def metrics(model: nn.Module, batch: Any) -> dict[str, Any]:
    """Zero-shot: of all captions there are, is the nearest one right?"""
    images, ids = batch
    every = torch.tensor(ALL_CAPTIONS, device=images.device)
    pictures, captions, _ = model(images, every)
    right = (every[(pictures @ captions.T).argmax(1)] == ids).all(1).sum()
    return {"right": Total(right, len(images))}


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--negatives", choices=["all", "own"], default="all")
    options, words = parser.parse_known_args()
    if not DATA.exists():
        raise SystemExit("apt-get install dataset-fashion-mnist")
    config = load_config(
        argv=words,
        defaults={
            "name": "contrastive",
            "global_batch_size": 128,  # without micro_batch_size each rank takes its part at once
            "max_steps": 200,
            "evaluation": {"every_steps": 100, "batch_size": 250},
            "optimization": {
                "learning_rate": 2e-3,
                "lr_scheduler_type": "cosine",
                "warmup_steps": 30,
            },
            "record": {"logging_steps": 50},
        },
    )
    loss = {"all": loss_over_all, "own": loss_over_own}[options.negatives]
    task = Task(TwoTowers, loss, metrics=metrics)
    Trainer(task, config).fit(Captioned("train", 20_000), Captioned("t10k", 2_000))


if __name__ == "__main__":
    main()
