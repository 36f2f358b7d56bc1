"""A LightningModule with a plateau for its learning rate: the same file before and after."""

import lightning
import torch
import torch.nn.functional as F
import torchmetrics
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

digits = load_digits()
images, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)


class Digits(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=10)

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        logits = self(batch[0])
        self.accuracy(logits, batch[1])
        self.log("val_loss", F.cross_entropy(logits, batch[1]))
        self.log("val_accuracy", self.accuracy)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=2.0)  # too high: the plateau comes soon
        plateau = ReduceLROnPlateau(optimizer, factor=0.3, patience=0)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"},
        }

    def train_dataloader(self):
        return DataLoader(TensorDataset(images[:192], labels[:192]), batch_size=32)

    def val_dataloader(self):
        return DataLoader(TensorDataset(images[1536:1664], labels[1536:1664]), batch_size=32)
