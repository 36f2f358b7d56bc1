"""RayTrainer(model, config) in a task of Ray, as in a trial of its Tune: ray_task.py FOLDER."""

import sys
from typing import Any

import ray
import torch
from torch import nn
from torch.utils.data import TensorDataset

from drivetrain import PyTorchDDPTrainer, RayTrainer


def small_data() -> TensorDataset:
    """Sums, and whether they are positive."""
    inputs = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, (inputs.sum(1) > 0).long())


def train_fn(config: dict[str, Any], folder: str) -> int:
    """One trial: the trainer's settings are taken from it, the model's left to it."""
    data = small_data()
    hidden = int(config["hidden_size"])
    model = nn.Sequential(nn.Linear(8, hidden), nn.ReLU(), nn.Linear(hidden, 2))
    trainer = RayTrainer(model, config, tensorboard=False, tensorboard_dir=folder)
    history = trainer.fit(data, data)
    assert trainer.best_accuracy is not None
    return len(history.steps)


if __name__ == "__main__":
    ray.init(num_cpus=4, include_dashboard=False)
    drawn = {"hidden_size": 4, "lr": 0.01, "batch_size": 8}
    num_steps = ray.get(ray.remote(train_fn).remote(drawn, f"{sys.argv[1]}/runs"))
    print(f"DONE {num_steps} steps", flush=True)
    given: dict[str, Any] = {
        "tensorboard": False,
        "tensorboard_dir": f"{sys.argv[1]}/runs",
        "batch_size": 8,
    }
    trainer = PyTorchDDPTrainer(nn.Linear(8, 2), backend="ray", num_gpus=1, **given)
    print(f"DONE on ray: {len(trainer.fit(small_data()).steps)} steps", flush=True)
