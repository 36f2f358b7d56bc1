"""Weigh grains by their outline; outlines come in parts, which another job writes to disk.

drivetrain train --nproc-per-node 2 puzzles/grains.py
"""

import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

from drivetrain import Task, Trainer, load_config

NUM_GRAINS, NUM_POINTS = 1030, 16
PART = 64
"""Grains in a file; the last one has the rest."""


def file_of(folder, part):
    return folder / f"part-{part:03d}.npy"


def write_parts(folder):
    """The other job: every file appears under its name when it is whole."""
    outlines = np.random.default_rng(9).normal(size=(NUM_GRAINS, NUM_POINTS)).astype(np.float32)
    for part in range(NUM_GRAINS // PART):
        rows = outlines[part * PART : (part + 1) * PART]
        aside = folder / "aside.npy"
        np.save(aside, rows)
        aside.rename(file_of(folder, part))


class Outlines(Dataset):
    def __init__(self, folder):
        self.folder = folder

    def __len__(self):
        return NUM_GRAINS

    def __getitem__(self, index):
        part, place = divmod(index, PART)
        file = file_of(self.folder, part)
        while not file.exists():
            time.sleep(0.05)
        outline = torch.from_numpy(np.load(file)[place])
        return outline, outline.abs().sum()


def make_model():
    return nn.Sequential(nn.Linear(NUM_POINTS, 32), nn.ReLU(), nn.Linear(32, 1))


def loss(model, batch):
    outlines, weights = batch
    return F.mse_loss(model(outlines).squeeze(1), weights)


def main():
    config = load_config(
        defaults={
            "global_batch_size": 16,
            "micro_batch_size": 8,
            "num_train_epochs": 1,
            "optimization": {"learning_rate": 5e-3},
            "checkpoint": {"every_steps": None},
            "data": {"num_workers": 1},
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        write_parts(Path(folder))
        trainer = Trainer(Task(model=make_model, loss=loss), config)
        history = trainer.fit(Outlines(Path(folder)))
        if trainer.is_main:
            print(f"last loss {history.losses[-1]:.4f} after {len(history.losses)} steps")


if __name__ == "__main__":
    main()
