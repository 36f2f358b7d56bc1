"""A Keras 3 model on torch, under Trainer.

pip install keras
python examples/keras_on_torch.py
"""

import os

os.environ["KERAS_BACKEND"] = "torch"  # before keras is imported

import keras
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from drivetrain import Task, Trainer, load_config


def model() -> nn.Module:
    """Build the model from its Input: torch must know all weights before the first batch."""
    layers = keras.layers
    built: nn.Module = keras.Sequential(
        [
            keras.Input((20,)),
            layers.Dense(64, activation="relu"),
            layers.Dense(64, activation="relu"),
            layers.Dense(4),
        ]
    )
    return built


def loss(network: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    inputs, labels = batch
    return F.cross_entropy(network(inputs), labels)


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(1024, 20, generator=generator)
    return TensorDataset(inputs, inputs[:, :4].argmax(dim=1))


def main() -> None:
    config = load_config(defaults={"global_batch_size": 32, "max_steps": 100})
    history = Trainer(Task(model, loss), config).fit(data())
    print(f"loss {history.steps[0].loss:.4f} -> {history.steps[-1].loss:.4f}")


if __name__ == "__main__":
    main()
