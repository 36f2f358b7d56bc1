# drivetrain train --nproc-per-node 2 after.py parallel.strategy=deepspeed; or fsdp, without DeepSpeed
import json
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Task, Trainer, load_config

digits = load_digits()
images = torch.tensor(digits.data[:1536] / 16, dtype=torch.float32)
data = TensorDataset(images, torch.tensor(digits.target[:1536]))


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


defaults = {
    "global_batch_size": 64,
    "micro_batch_size": 16,
    "num_train_epochs": 2,
    "optimization": {"max_grad_norm": 1.0},
    "parallel": {"deepspeed": {"zero_stage": 2}},
}
task = Task(make_model, loss, optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3))
trainer = Trainer(task, load_config(defaults=defaults))
history = trainer.fit(DataLoader(data))
if trainer.is_main:
    print("losses", json.dumps(history.losses))
