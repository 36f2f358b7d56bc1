"""The module and its data: the same file before and after."""

from typing import Any

import lightning
import torch
import torch.nn.functional as F
import torchmetrics
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Digits(lightning.LightningModule):
    def __init__(self, lr: float = 2e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=10)

    def forward(self, x: torch.Tensor) -> Any:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        out = self(batch[0])
        self.accuracy(out, batch[1])
        self.log("val_loss", F.cross_entropy(out, batch[1]))
        self.log("val_accuracy", self.accuracy)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=steps)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


class DigitsData(lightning.LightningDataModule):
    def setup(self, stage: str) -> None:
        digits = load_digits()
        images = torch.tensor(digits.data / 16, dtype=torch.float32)
        labels = torch.tensor(digits.target)
        self.train = TensorDataset(images[:1536], labels[:1536])
        self.val = TensorDataset(images[1536:], labels[1536:])

    def train_dataloader(self) -> Any:
        return DataLoader(self.train, batch_size=64)

    def val_dataloader(self) -> Any:
        return DataLoader(self.val, batch_size=64)
