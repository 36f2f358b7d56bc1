# python before.py
import json

import torch
from module import data, make_model
from torch.utils.data import DataLoader

model = make_model()
optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)

losses = []
for batch in DataLoader(data, batch_size=16):
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())

model.save_pretrained("adapter")
print("losses", json.dumps(losses))
