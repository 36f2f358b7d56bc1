"""Images and labels: Fashion-MNIST as Debian packs it, or folders of pictures as ImageNet has them.

apt-get install dataset-fashion-mnist
python examples/applications/images/data.py pictures      # a small folder of generated pictures
"""

from __future__ import annotations

import gzip
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch.utils.data import Dataset

FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")
_NUM_CLASSES = 10


class FashionMNIST(Dataset[tuple[torch.Tensor, int]]):
    """60,000 and 10,000 grey pictures of 28 × 28, from the four files the data set consists of."""

    num_channels, num_classes = 1, _NUM_CLASSES

    def __init__(self, folder: Path, part: str, *, is_augmented: bool) -> None:
        name = {"train": "train", "val": "t10k"}[part]
        images = _read_idx(folder / f"{name}-images-idx3-ubyte.gz").reshape(-1, 1, 28, 28)
        self.images = torch.from_numpy(images.copy())
        self.labels = _read_idx(folder / f"{name}-labels-idx1-ubyte.gz").tolist()
        self.is_augmented = is_augmented

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = (self.images[index].float() / 255 - 0.286) / 0.353
        return augment(image, padding=2) if self.is_augmented else image, self.labels[index]


def _read_idx(path: Path) -> np.ndarray[Any, Any]:
    """The bytes behind the header, whose fourth byte says how many sizes it has."""
    data = gzip.decompress(path.read_bytes())
    return np.frombuffer(data, np.uint8, offset=4 + 4 * data[3])


class PictureFolder(Dataset[tuple[torch.Tensor, int]]):
    """folder/train/CLASS/*.png and folder/val/CLASS/*.png, as ImageNet is usually unpacked."""

    num_channels = 3

    def __init__(self, folder: Path, part: str, *, is_augmented: bool, size: int) -> None:
        self.classes = sorted(each.name for each in (folder / "train").iterdir() if each.is_dir())
        self.num_classes, self.size, self.is_augmented = len(self.classes), size, is_augmented
        self.files = [
            (path, label)
            for label, name in enumerate(self.classes)
            for path in sorted((folder / part / name).iterdir())
        ]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path, label = self.files[index]
        with Image.open(path) as picture:
            pixels = np.asarray(picture.convert("RGB"), np.float32)
        image = torch.from_numpy(pixels).permute(2, 0, 1) / 255
        image = (resized(image, self.size, at_random=self.is_augmented) - 0.45) / 0.225
        return augment(image, padding=self.size // 8) if self.is_augmented else image, label


def resized(image: torch.Tensor, size: int, *, at_random: bool) -> torch.Tensor:
    """A square out of the picture, in this size: a random one to train on, else the middle one."""
    height, width = image.shape[-2:]
    side = min(height, width)
    if at_random:
        side = int(side * (0.5 + 0.5 * torch.rand(()).item()))
        top = int(torch.randint(height - side + 1, ()))
        left = int(torch.randint(width - side + 1, ()))
    else:
        top, left = (height - side) // 2, (width - side) // 2
    square = image[None, :, top : top + side, left : left + side]
    return F.interpolate(square, (size, size), mode="bilinear", antialias=True)[0]


def augment(image: torch.Tensor, padding: int) -> torch.Tensor:
    """Mirrored, moved by a few pixels, with a square cut out: each by chance.

    Drawn from torch's own stream, which follows (seed, step, micro-batch) on any number of ranks.
    """
    size = image.shape[-1]
    if torch.rand(()) < 0.5:
        image = image.flip(-1)
    top, left = torch.randint(2 * padding + 1, (2,)).tolist()
    moved = F.pad(image, (padding,) * 4)[:, top : top + size, left : left + size].clone()
    if torch.rand(()) < 0.25:
        side = size // 4
        y, x = torch.randint(size - side + 1, (2,)).tolist()
        moved[:, y : y + side, x : x + side] = 0
    return moved


def generate_pictures(folder: Path, num_classes: int = 6, per_class: int = 40) -> None:
    """Stripes at one angle per class, in random colours and noise, to try the path with."""
    random = np.random.default_rng(0)
    rows, columns = np.mgrid[0:64, 0:80]
    for label in range(num_classes):
        angle = np.pi * label / num_classes
        for number in range(per_class):
            phase = random.uniform(0, 2 * np.pi)
            wave = np.sin((rows * np.sin(angle) + columns * np.cos(angle)) / 4 + phase)
            colour = random.uniform(40, 110, 3)
            picture = 128 + wave[..., None] * colour + random.normal(0, 25, (64, 80, 3))
            part = "val" if number % 5 == 0 else "train"
            path = folder / part / f"stripes-{label * 180 // num_classes}" / f"{number:03d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(picture.clip(0, 255).astype(np.uint8)).save(path)


if __name__ == "__main__":
    generate_pictures(Path(sys.argv[1]))
