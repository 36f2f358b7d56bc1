# python before.py
import json

import torch
import torch.nn.functional as F
from module import Clip, data
from torch.utils.data import DataLoader

torch.manual_seed(0)
model = Clip()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

losses = []
for upper, lower in DataLoader(data, batch_size=64):
    ups, downs, scale = model(upper, lower)
    logits = scale * ups @ downs.T
    own = torch.arange(len(logits))
    loss = (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())

print("losses", json.dumps(losses))
