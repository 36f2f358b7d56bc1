# torchrun --nproc-per-node 2 before.py, or accelerate launch on GPUs
import json

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
digits = load_digits()
images = torch.tensor(digits.data[:1536] / 16, dtype=torch.float32)
data = TensorDataset(images, torch.tensor(digits.target[:1536]))

set_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
# prepare() steps it once for each process: 2 × 48 times
scheduler = LambdaLR(optimizer, lambda step: 1 - step / (2 * 48))
loader = DataLoader(data, batch_size=16)  # per process
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

losses = []
parts = []
for _ in range(2):
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        parts.append(accelerator.reduce(loss.detach(), reduction="mean").item())
        if accelerator.sync_gradients:
            losses.append(sum(parts) / len(parts))
            parts = []

if accelerator.is_main_process:
    print("losses", json.dumps(losses))
accelerator.end_training()
