"""RayTrainer from a driver: python ray_drop_in.py RUNS_FOLDER."""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

from drivetrain import RayTrainer

if __name__ == "__main__":
    torch.manual_seed(0)
    inputs = torch.randn(96, 8)
    data = TensorDataset(inputs, (inputs.sum(1) > 0).long())
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    before = model[0].weight.detach().clone()
    trainer = RayTrainer(
        model=model,
        num_workers=2,
        batch_size=8,
        epochs=4,
        learning_rate=0.01,
        tensorboard=False,
        tensorboard_dir=sys.argv[1],
    )
    history = trainer.fit(data, data)
    moved = not torch.equal(before, model[0].weight)
    right = (model(inputs).argmax(1) == data.tensors[1]).float().mean().item()
    print(f"steps {len(history.steps)}, trained {moved}, accuracy {trainer.best_accuracy:.3f}")
    print(f"agrees {abs(right - (trainer.best_accuracy or 0)) < 0.2}")
