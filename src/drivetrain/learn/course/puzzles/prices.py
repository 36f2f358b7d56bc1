"""Estimate house prices, with a penalty on large weights.

drivetrain train --nproc-per-node 2 puzzles/prices.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from drivetrain import Task, Trainer, load_config

NUM_HOUSES, NUM_FACTS = 512, 20
PENALTY = 1e-3


def sold():
    generator = torch.Generator().manual_seed(5)
    facts = torch.randn(NUM_HOUSES, NUM_FACTS, generator=generator)
    worth = torch.randn(NUM_FACTS, generator=generator)
    noise = torch.randn(NUM_HOUSES, generator=generator)
    return TensorDataset(facts, facts @ worth + 0.3 * noise)


def make_model():
    return nn.Sequential(nn.Linear(NUM_FACTS, 32), nn.Tanh(), nn.Linear(32, 1))


def num_ranks():
    return dist.get_world_size() if dist.is_initialized() else 1


def size_of(model):
    """The sum of all squared weights; the same on every rank, as all have the same weights."""
    return sum(weight.square().sum() for weight in model.parameters())


def loss(model, batch):
    facts, prices = batch
    estimates = model(facts).squeeze(1)
    error = F.mse_loss(estimates, prices)
    # Gradients are averaged over the ranks, so the penalty would count only 1/n.
    penalty = PENALTY * num_ranks() * size_of(model)
    return error + penalty


def main():
    config = load_config(
        defaults={
            "global_batch_size": 32,
            "micro_batch_size": 8,
            "max_steps": 60,
            "optimization": {"learning_rate": 5e-3},
            "checkpoint": {"every_steps": None},
        }
    )
    trainer = Trainer(Task(model=make_model, loss=loss), config)
    history = trainer.fit(sold())
    if trainer.is_main:
        print(f"last loss {history.losses[-1]:.4f}")


if __name__ == "__main__":
    main()
