# python before.py
import json

import torch
from module import GPT, STEPS, Windows, get_lr, val
from torch import nn
from torch.utils.data import DataLoader

torch.manual_seed(1337)
model = GPT()
optimizer = model.configure_optimizers(0.1, 1e-2, (0.9, 0.95))
batches = iter(DataLoader(Windows(), batch_size=4))
accumulation = 4


@torch.no_grad()
def estimate_loss():
    model.eval()
    found = [model(x, y)[1].item() for x, y in DataLoader(val, batch_size=4)]
    model.train()
    return sum(found) / len(found)


losses = []
for it in range(STEPS):
    for group in optimizer.param_groups:
        group["lr"] = get_lr(it)
    parts = []
    for _ in range(accumulation):
        x, y = next(batches)
        loss = model(x, y)[1]
        (loss / accumulation).backward()
        parts.append(loss.item())
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(sum(parts) / accumulation)

metrics = {"val_loss": estimate_loss()}
print("losses", json.dumps(losses))
print("metrics", json.dumps(metrics))
