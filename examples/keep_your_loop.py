"""An existing loop with a few lines changed: `prepare`, `backward`, `step`.

python examples/keep_your_loop.py
drivetrain train examples/keep_your_loop.py --nproc-per-node 2
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import drivetrain


def metrics(model: nn.Module, batch: Any) -> dict[str, Any]:
    images, labels = batch
    return {"accuracy": (model(images).argmax(dim=1) == labels).float().mean()}


def main() -> None:
    digits = load_digits()
    images = torch.tensor(digits.data / 16, dtype=torch.float32)
    labels = torch.tensor(digits.target)
    train, val = (
        TensorDataset(images[:1500], labels[:1500]),
        TensorDataset(images[1500:], labels[1500:]),
    )
    config = drivetrain.load_config(
        defaults={"global_batch_size": 64, "micro_batch_size": 16, "num_train_epochs": 5}
    )

    torch.manual_seed(0)  # a model built here has the script's seed: the same weights at each start
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    loop = drivetrain.prepare(model, optimizer, train, config)
    for step in loop.steps():  # one optimizer step on one global batch
        for x, y in step:  # this rank's micro-batches
            loop.backward(F.cross_entropy(loop.model(x), y))
        loop.step()
        if loop.ends_epoch:
            loop.evaluate(val, metrics)  # every sample once, on any number of ranks

    if loop.is_main and loop.history.losses:  # empty if the run was already complete
        print(f"{len(loop.history.steps)} steps, last loss {loop.history.losses[-1]:.4f}")


if __name__ == "__main__":
    main()
