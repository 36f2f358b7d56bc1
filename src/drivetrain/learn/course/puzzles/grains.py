"""Predict the weight of grains from their outlines, which are in many small, partly cached files.

drivetrain train --nproc-per-node 2 puzzles/grains.py
"""

import queue
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

from drivetrain import Task, Trainer, load_config

NUM_GRAINS, NUM_POINTS = 1000, 16
PART = 8
"""Grains per file."""
KEPT = 64
"""Files kept in memory."""


def file_of(folder, part):
    return folder / f"part-{part:03d}.npy"


def write_parts(folder):
    outlines = np.random.default_rng(9).normal(size=(NUM_GRAINS, NUM_POINTS)).astype(np.float32)
    for part in range(NUM_GRAINS // PART):
        np.save(file_of(folder, part), outlines[part * PART : (part + 1) * PART])


class Outlines(Dataset):
    """Reads a file once, and keeps it until enough other files have been read after it."""

    def __init__(self, folder):
        self.folder = folder
        self.loaded = {}
        self.order = queue.Queue(maxsize=KEPT)

    def __len__(self):
        return NUM_GRAINS

    def __getitem__(self, index):
        part, place = divmod(index, PART)
        if part not in self.loaded:
            self.load(part)
        outline = torch.from_numpy(self.loaded[part][place])
        return outline, outline.abs().sum()

    def load(self, part):
        if self.order.qsize() > KEPT:
            oldest = self.order.get()
            del self.loaded[oldest]
        self.order.put(part)
        self.loaded[part] = np.load(file_of(self.folder, part))


def make_model():
    return nn.Sequential(nn.Linear(NUM_POINTS, 32), nn.ReLU(), nn.Linear(32, 1))


def loss(model, batch):
    outlines, weights = batch
    return F.mse_loss(model(outlines).squeeze(1), weights)


def main():
    config = load_config(
        defaults={
            "global_batch_size": 10,
            "micro_batch_size": 5,
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
