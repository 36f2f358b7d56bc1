# drivetrain train --nproc-per-node 2 after.py
import json

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import drivetrain

digits = load_digits()
images = torch.tensor(digits.data[:1536] / 16, dtype=torch.float32)
data = TensorDataset(images, torch.tensor(digits.target[:1536]))

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
defaults = {
    "global_batch_size": 64,
    "num_train_epochs": 2,
    "optimization": {"max_grad_norm": 1.0},
}
config = drivetrain.load_config(defaults=defaults)
loop = drivetrain.prepare(model, optimizer, DataLoader(data), config)  # in order, as before

for step in loop.steps():
    for x, y in step:
        loop.backward(F.cross_entropy(loop.model(x), y))
    loop.step()

if loop.is_main:
    print("losses", json.dumps(loop.history.losses))
