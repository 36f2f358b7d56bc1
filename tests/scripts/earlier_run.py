"""Four parameters, and a run that any later version must be able to resume."""

import torch
from torch.utils.data import TensorDataset

import drivetrain
from drivetrain import Task, Trainer


def loss(model: torch.nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    x, y = batch
    return torch.nn.functional.mse_loss(model(x), y)


def main() -> None:
    x = torch.arange(64.0).reshape(32, 2) / 64
    data = TensorDataset(x, x.sum(1, keepdim=True))
    Trainer(Task(lambda: torch.nn.Linear(2, 1), loss), drivetrain.load_config()).fit(data)


if __name__ == "__main__":
    main()
