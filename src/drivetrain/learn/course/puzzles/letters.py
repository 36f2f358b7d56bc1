"""Classify letters of which one is rare, and count how often the rare one occurred.

drivetrain train --nproc-per-node 2 puzzles/letters.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from drivetrain import Hook, Task, Trainer, load_config

NUM_SAMPLES, NUM_STROKES, NUM_LETTERS = 960, 24, 10
RARE = NUM_LETTERS - 1


def written():
    generator = torch.Generator().manual_seed(8)
    shapes = torch.randn(NUM_LETTERS, NUM_STROKES, generator=generator)
    letters = torch.randint(RARE, (NUM_SAMPLES,), generator=generator)
    letters[::80] = RARE
    noise = torch.randn(NUM_SAMPLES, NUM_STROKES, generator=generator)
    return TensorDataset(shapes[letters] + noise, letters)


class RareLetters(Hook):
    """Counts the rare letters on all ranks together."""

    def __init__(self):
        self.total = 0
        self.group = None

    def on_fit_start(self, trainer):
        # A separate group, so that the counts do not interfere with the gradients.
        if dist.is_initialized() and dist.get_world_size() > 1:
            self.group = dist.new_group()

    def count(self, letters):
        found = (letters == RARE).sum().reshape(1)
        if self.group is not None and found > 0:
            dist.all_reduce(found, group=self.group)
        self.total += int(found)


def main():
    config = load_config(
        defaults={
            "global_batch_size": 16,
            "micro_batch_size": 8,
            "max_steps": 60,
            "optimization": {"learning_rate": 5e-3},
            "checkpoint": {"every_steps": None},
        }
    )
    rare = RareLetters()

    def loss(model, batch):
        strokes, letters = batch
        rare.count(letters)
        return F.cross_entropy(model(strokes), letters)

    def make_model():
        return nn.Sequential(nn.Linear(NUM_STROKES, 40), nn.Tanh(), nn.Linear(40, NUM_LETTERS))

    trainer = Trainer(Task(model=make_model, loss=loss), config, hooks=[rare])
    history = trainer.fit(written())
    if trainer.is_main:
        print(f"last loss {history.losses[-1]:.4f}, {rare.total} rare letters")


if __name__ == "__main__":
    main()
