"""A ResNet or a vision transformer on handwritten digits (included in scikit-learn).

drivetrain train examples/vision.py --nproc-per-node 2
drivetrain train --nproc-per-node 2 examples/vision.py --model vit parallel.tp=2
drivetrain train --nproc-per-node 2 examples/vision.py --model vit parallel.pp=2
"""

from __future__ import annotations

import argparse
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Subset, TensorDataset

from drivetrain import Task, Total, Trainer, load_config

CLASSES = 10


class Residual(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(after), nn.BatchNorm2d(after)
        self.skip = nn.Identity() if before == after else nn.Conv2d(before, after, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + self.skip(x))


class ResNet(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width))
        shapes = [(width, width, 1), (width, 2 * width, 2), (2 * width, 2 * width, 1)]
        self.blocks = nn.ModuleList(Residual(*shape) for shape in shapes)
        self.head = nn.Linear(2 * width, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.stem(images))
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x.mean((-2, -1)))
        return logits


class Encoder(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.head_size = heads, width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # heads come first, so that a tensor-parallel rank gets whole heads with their q, k and v
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (-1, 3, self.head_size)).unbind(-2)
        attended = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        )
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        encoded: torch.Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return encoded


class ViT(nn.Module):
    # how to shard each layer (parallel.tp): by outputs, then by inputs with summed results
    tp_plan: ClassVar[dict[str, str]] = {
        "blocks.*.qkv": "colwise",
        "blocks.*.out": "rowwise",
        "blocks.*.up": "colwise",
        "blocks.*.down": "rowwise",
    }

    def __init__(self, width: int = 32, layers: int = 4, patch: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, patch, patch)
        self.positions = nn.Parameter(0.5 * torch.randn(1, (8 // patch) ** 2, width))
        self.blocks = nn.ModuleList(Encoder(width, 4) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x).mean(1))
        return logits


MODELS: dict[str, type[nn.Module]] = {"resnet": ResNet, "vit": ViT}


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def metrics(model: nn.Module, batch: Any) -> dict[str, Any]:
    images, labels = batch
    logits = model(images)
    right = (logits.argmax(1) == labels).sum()
    return {"loss": F.cross_entropy(logits, labels), "accuracy": Total(right, len(labels))}


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--model", choices=MODELS, default="resnet")
    options, words = parser.parse_known_args()
    config = load_config(
        argv=words,
        defaults={
            "name": options.model,
            "global_batch_size": 64,
            "micro_batch_size": 16,
            "num_train_epochs": 6,
            "optimization": {"learning_rate": 2e-3, "max_grad_norm": 1.0},
        },
    )
    digits = load_digits()
    images = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1)
    data = TensorDataset(images, torch.tensor(digits.target))
    train, val = Subset(data, range(1500)), Subset(data, range(1500, len(data)))
    trainer = Trainer(Task(MODELS[options.model], loss, metrics=metrics), config)
    history = trainer.fit(train, val)
    if trainer.is_main:
        print(f"best accuracy {history.best_accuracy:.4f} in {history.total_time:.1f} s")


if __name__ == "__main__":
    main()
