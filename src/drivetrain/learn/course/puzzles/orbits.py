"""Learn an orbit's energy; from time to time the weights are shaken to leave flat regions.

drivetrain train --nproc-per-node 2 puzzles/orbits.py
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from drivetrain import Hook, Task, Trainer, load_config

NUM_ORBITS = 600
SHAKE_EVERY, SHAKE_BY = 8, 1e-3


def observed():
    """Position and velocity in two dimensions; the energy is computed from them."""
    seen = torch.randn(NUM_ORBITS, 4, generator=torch.Generator().manual_seed(6))
    place, speed = seen[:, :2], seen[:, 2:]
    energy = 0.5 * speed.square().sum(1) - 1 / (place.norm(dim=1) + 0.5)
    return TensorDataset(seen, energy)


def make_model():
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 1))


def loss(model, batch):
    seen, energy = batch
    return F.mse_loss(model(seen).squeeze(1), energy)


class Shake(Hook):
    """Adds a little noise to all weights every SHAKE_EVERY steps."""

    @torch.no_grad()
    def on_train_batch_end(self, trainer, step):
        if step % SHAKE_EVERY:
            return
        for weight in trainer.model.parameters():
            noise = torch.randn(weight.shape)
            weight.add_(SHAKE_BY * noise)


def main():
    config = load_config(
        defaults={
            "global_batch_size": 24,
            "micro_batch_size": 12,
            "max_steps": 60,
            "optimization": {"learning_rate": 5e-3},
            "checkpoint": {"every_steps": None},
        }
    )
    trainer = Trainer(Task(model=make_model, loss=loss), config, hooks=[Shake()])
    history = trainer.fit(observed())
    if trainer.is_main:
        print(f"last loss {history.losses[-1]:.4f}")


if __name__ == "__main__":
    main()
