"""Classify five kinds of stars by their spectra.

drivetrain train --nproc-per-node 2 puzzles/spectra.py
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from drivetrain import Task, Trainer, load_config

NUM_STARS, NUM_BANDS, NUM_KINDS = 640, 32, 5


def measured():
    """Each kind has its own spectrum; every star is measured with noise."""
    generator = torch.Generator().manual_seed(3)
    typical = torch.randn(NUM_KINDS, NUM_BANDS, generator=generator)
    kinds = torch.randint(NUM_KINDS, (NUM_STARS,), generator=generator)
    noise = torch.randn(NUM_STARS, NUM_BANDS, generator=generator)
    return TensorDataset(typical[kinds] + 2.0 * noise, kinds)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(NUM_BANDS, 48)
        self.norm = nn.BatchNorm1d(48)
        self.head = nn.Linear(48, NUM_KINDS)
        # Running statistics are almost equal on all ranks: DDP need not send them in every step.
        self._ddp_params_and_buffers_to_ignore = [
            f"norm.{name}" for name, _ in self.norm.named_parameters()
        ]

    def forward(self, spectra):
        return self.head(torch.tanh(self.norm(self.embed(spectra))))


def loss(model, batch):
    spectra, kinds = batch
    return F.cross_entropy(model(spectra), kinds)


def main():
    config = load_config(
        defaults={
            "global_batch_size": 32,
            "micro_batch_size": 16,
            "max_steps": 60,
            "optimization": {"learning_rate": 1e-2},
            "checkpoint": {"every_steps": None},
        }
    )
    trainer = Trainer(Task(model=Classifier, loss=loss), config)
    history = trainer.fit(measured())
    if trainer.is_main:
        print(f"last loss {history.losses[-1]:.4f}")


if __name__ == "__main__":
    main()
