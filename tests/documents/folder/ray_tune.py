"""RayTrainer(model, config) in a function for Ray Tune, and backend="ray": ray_tune.py FOLDER."""

import sys
from typing import Any

import ray
import torch
from ray import tune
from torch import nn
from torch.utils.data import TensorDataset

from drivetrain import PyTorchDDPTrainer, RayTrainer

FOLDER = sys.argv[1]


def data() -> TensorDataset:
    """A sum, and whether it is positive."""
    inputs = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, (inputs.sum(1) > 0).long())


def train_fn(config: dict[str, Any]) -> dict[str, Any]:
    """One trial."""
    hidden = int(config["hidden_size"])
    model = nn.Sequential(nn.Linear(8, hidden), nn.ReLU(), nn.Linear(hidden, 2))
    trainer = RayTrainer(model, config, tensorboard=False, tensorboard_dir=f"{FOLDER}/runs")
    trainer.fit(data(), data())
    return {"accuracy": trainer.best_accuracy}


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False)
    analysis = tune.run(
        train_fn,
        config={
            "hidden_size": tune.choice([4, 8]),
            "lr": tune.loguniform(1e-4, 1e-2),
            "batch_size": tune.choice([8, 16]),
        },
        num_samples=2,
        resources_per_trial={"cpu": 1},
        storage_path=f"{FOLDER}/tune",
        metric="accuracy",
        mode="max",
    )
    names = ", ".join(sorted(analysis.best_config, reverse=True))
    print(f"DONE {len(analysis.trials)} trials, {names}", flush=True)
    trainer = PyTorchDDPTrainer(
        nn.Linear(8, 2),
        backend="ray",
        num_gpus=1,
        batch_size=8,
        tensorboard=False,
        tensorboard_dir=f"{FOLDER}/runs",
    )
    print(f"DONE on ray: {len(trainer.fit(data()).steps)} steps", flush=True)
