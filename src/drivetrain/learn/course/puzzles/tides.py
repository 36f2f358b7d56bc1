"""Forecast the tide from the last day's levels; the optimizer's state is split among the ranks.

drivetrain train --nproc-per-node 2 puzzles/tides.py
"""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from drivetrain import Task, Trainer, load_config

NUM_HOURS, WINDOW = 600, 24


def levels():
    """Moon, sun and some wind; the input is a day, the output the hour after it."""
    hours = torch.arange(NUM_HOURS + WINDOW, dtype=torch.float32)
    tide = torch.sin(2 * math.pi * hours / 12.42) + 0.5 * torch.sin(2 * math.pi * hours / 12)
    wind = torch.randn(len(hours), generator=torch.Generator().manual_seed(2))
    windows = (tide + 0.1 * wind).unfold(0, WINDOW + 1, 1)
    return TensorDataset(windows[:, :WINDOW], windows[:, WINDOW])


def make_model():
    return nn.Sequential(nn.Linear(WINDOW, 64), nn.Tanh(), nn.Linear(64, 1))


def loss(model, batch):
    day, next_hour = batch
    return F.mse_loss(model(day).squeeze(1), next_hour)


class ShardedMomentum(torch.optim.Optimizer):
    """SGD whose momentum is split: a rank keeps its part, steps it, and sends it to the others."""

    def __init__(self, parameters, lr, momentum=0.9):
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                move = self.move_of(parameter, group["momentum"])
                parameter.sub_(group["lr"] * move.view_as(parameter))

    def move_of(self, parameter, momentum):
        rank, num_ranks = who_am_i()
        gradient = parameter.grad.flatten()
        size = -(-len(gradient) // num_ranks)
        padded = F.pad(gradient, (0, size * num_ranks - len(gradient)))
        # After a ring's reduce-scatter, rank r has the whole sum of part r + 1.
        part = (rank + 1) % num_ranks
        own = padded[part * size : (part + 1) * size]
        state = self.state[parameter]
        state["momentum"] = momentum * state.get("momentum", torch.zeros(size)) + own
        return all_parts(state["momentum"])[: len(gradient)]


def who_am_i():
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def all_parts(own):
    """Every rank's part, concatenated."""
    num_ranks = who_am_i()[1]
    if num_ranks == 1:
        return own
    everyone = torch.empty(num_ranks * len(own))
    dist.all_gather_into_tensor(everyone, own)
    return everyone


def make_optimizer(parameters, optimization):
    return ShardedMomentum(parameters, lr=optimization.learning_rate)


def main():
    config = load_config(
        defaults={
            "global_batch_size": 24,
            "micro_batch_size": 12,
            "max_steps": 60,
            "optimization": {"learning_rate": 2e-2},
            "checkpoint": {"every_steps": None},
        }
    )
    task = Task(model=make_model, loss=loss, optimizer=make_optimizer)
    trainer = Trainer(task, config)
    history = trainer.fit(levels())
    if trainer.is_main:
        print(f"last loss {history.losses[-1]:.4f}")


if __name__ == "__main__":
    main()
