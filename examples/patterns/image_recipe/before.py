# python before.py
import copy
import json

import torch
from module import STEPS, MixUp, loss, make_model, right, val
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader

torch.manual_seed(0)
model = make_model()
average = copy.deepcopy(model).eval()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
scheduler = OneCycleLR(optimizer, max_lr=0.2, total_steps=STEPS)

losses = []
for batch in DataLoader(MixUp(), batch_size=32):
    found = loss(model, batch)
    found.backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    losses.append(found.item())
    with torch.no_grad():
        for own, new in zip(average.parameters(), model.parameters(), strict=True):
            own.lerp_(new, 0.1)
        for own, new in zip(average.buffers(), model.buffers(), strict=True):
            own.copy_(new)

num_right = {"top1": 0, "top5": 0}
with torch.no_grad():
    for x, y in DataLoader(val, batch_size=32):
        logits = average(x)
        num_right["top1"] += int(right(logits, y, 1))
        num_right["top5"] += int(right(logits, y, 5))
print("losses", json.dumps(losses))
print("metrics", json.dumps({name: number / len(val) for name, number in num_right.items()}))
