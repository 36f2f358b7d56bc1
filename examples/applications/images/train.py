r"""A ResNet or a vision transformer, with the recipe of the day, on Fashion-MNIST or on folders.

drivetrain train --nproc-per-node 2 examples/applications/images/train.py
drivetrain train --nproc-per-node 2 examples/applications/images/train.py --model vit
drivetrain train --nproc-per-node 2 examples/applications/images/train.py \
    --model resnet50 --pictures /data/imagenet --size 224
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from data import FASHION_MNIST, FashionMNIST, PictureFolder
from torch import nn

from drivetrain import EMA, Task, Total, Trainer, load_config


class Basic(nn.Module):
    """Two 3 × 3 convolutions, as in ResNet-18."""

    growth = 1

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *convolution(before, width, 3, stride), nn.ReLU(), *convolution(width, width, 3)
        )
        self.skip = shortcut(before, width, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.layers(x) + self.skip(x))


class Bottleneck(nn.Module):
    """1 × 1, 3 × 3, 1 × 1, as in ResNet-50."""

    growth = 4

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *convolution(before, width, 1),
            nn.ReLU(),
            *convolution(width, width, 3, stride),
            nn.ReLU(),
            *convolution(width, 4 * width, 1),
        )
        self.skip = shortcut(before, 4 * width, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.layers(x) + self.skip(x))


def convolution(before: int, after: int, size: int, stride: int = 1) -> list[nn.Module]:
    layer = nn.Conv2d(before, after, size, stride, size // 2, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return [layer, nn.BatchNorm2d(after)]


def shortcut(before: int, after: int, stride: int) -> nn.Module:
    if before == after and stride == 1:
        return nn.Identity()
    return nn.Sequential(*convolution(before, after, 1, stride))


class ResNet(nn.Module):
    """Four stages; the stem of large pictures halves twice before the first."""

    def __init__(
        self,
        block: type[Basic | Bottleneck],
        depths: tuple[int, ...],
        data: FashionMNIST | PictureFolder,
        width: int,
    ) -> None:
        super().__init__()
        is_large = getattr(data, "size", 28) > 64
        stem = convolution(data.num_channels, width, 7 if is_large else 3, 2 if is_large else 1)
        pool = [nn.MaxPool2d(3, 2, 1)] if is_large else []
        self.stem = nn.Sequential(*stem, nn.ReLU(), *pool)
        blocks: list[nn.Module] = []
        before = width
        for stage, depth in enumerate(depths):
            for number in range(depth):
                stride = 2 if stage > 0 and number == 0 else 1
                blocks.append(block(before, width << stage, stride))
                before = (width << stage) * block.growth
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(before, data.num_classes)
        self.to(memory_format=torch.channels_last)  # convolutions are a fifth faster
        # of 1 × 1 convolutions both orders are one, and DDP takes them for two
        warnings.filterwarnings("ignore", message="Grad strides do not match bucket view")

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.stem(images.contiguous(memory_format=torch.channels_last))
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x.mean((-2, -1)))
        return logits


class ViT(nn.Module):
    """A vision transformer that pools over its patches."""

    def __init__(self, data: FashionMNIST | PictureFolder, width: int, layers: int) -> None:
        super().__init__()
        size = getattr(data, "size", 28)
        patch = 4 if size <= 64 else 16
        self.patches = nn.Conv2d(data.num_channels, width, patch, patch)
        self.positions = nn.Parameter(0.02 * torch.randn(1, (size // patch) ** 2, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, width // 32, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, data.num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x).mean(1))
        return logits


def models(data: FashionMNIST | PictureFolder, width: int) -> dict[str, Callable[[], nn.Module]]:
    """By name; width is that of ResNet's first stage, 64 in the paper."""
    return {
        "resnet18": lambda: ResNet(Basic, (2, 2, 2, 2), data, width),
        "resnet50": lambda: ResNet(Bottleneck, (3, 4, 6, 3), data, width),
        "vit": lambda: ViT(data, 2 * width, 6),
    }


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels, label_smoothing=0.1)


def metrics(model: nn.Module, batch: Any) -> dict[str, Any]:
    images, labels = batch
    logits = model(images)
    ranked = logits.topk(min(5, logits.shape[1])).indices == labels[:, None]
    return {
        "loss": F.cross_entropy(logits, labels),
        "accuracy": Total(ranked[:, 0].sum(), len(labels)),
        "top5": Total(ranked.any(1).sum(), len(labels)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--model", choices=["resnet18", "resnet50", "vit"], default="resnet18")
    parser.add_argument("--width", type=int, help="of ResNet's first stage; ViT has twice that")
    parser.add_argument("--pictures", type=Path, help="a folder with train/CLASS and val/CLASS")
    parser.add_argument("--size", type=int, default=64, help="of the squares cut out of pictures")
    options, words = parser.parse_known_args()
    train, val = (read(options, part) for part in ("train", "val"))
    width = options.width or (64 if options.pictures else 16)
    config = load_config(
        argv=words,
        defaults={
            "name": options.model,
            "global_batch_size": 128,
            "num_train_epochs": 3,
            "optimization": {
                "learning_rate": 4e-3,
                "lr_scheduler_type": "cosine",
                "warmup_ratio": 0.1,
                "weight_decay": 0.05,
                "max_grad_norm": 1.0,
            },
            "evaluation": {"batch_size": 500},
        },
    )
    task = Task(models(train, width)[options.model], loss, metrics=metrics)
    trainer = Trainer(task, config, hooks=[EMA(decay=0.99)])
    history = trainer.fit(train, val)
    if trainer.is_main:
        print(f"best accuracy {history.best_accuracy:.4f} in {history.total_time:.0f} s")


def read(options: argparse.Namespace, part: str) -> FashionMNIST | PictureFolder:
    """Training pictures are augmented, the others are not."""
    is_augmented = part == "train"
    if options.pictures:
        size: int = options.size
        return PictureFolder(options.pictures, part, is_augmented=is_augmented, size=size)
    if not FASHION_MNIST.exists():
        raise SystemExit("apt-get install dataset-fashion-mnist, or --pictures FOLDER")
    return FashionMNIST(FASHION_MNIST, part, is_augmented=is_augmented)


if __name__ == "__main__":
    main()
