"""What the snippets find: a small model, its data, a loss. The rest they bring themselves."""

from __future__ import annotations

import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class MyModel(nn.Module):
    """784 numbers, ten classes."""

    def __init__(self, hidden_size: int = 16) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(784, hidden_size), nn.ReLU(), nn.Linear(hidden_size, 10)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits."""
        logits: torch.Tensor = self.layers(x)
        return logits


torch.manual_seed(0)
images = torch.randn(64, 784)
dataset = TensorDataset(images, (images[:, :10] + images[:, 10:20]).argmax(1))
train_loader = DataLoader(dataset, batch_size=32, shuffle=True)
val_loader = DataLoader(dataset, batch_size=32)
model = MyModel()
large_model = MyModel(64)
loss_fn = nn.CrossEntropyLoss()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
create_model = MyModel
num_gpus = int(os.environ.get("WORLD_SIZE", "1"))
rank = int(os.environ.get("RANK", "0"))
