# drivetrain train --nproc-per-node 2 after.py
import json

import torch
import torch.nn.functional as F
from module import collate, make_model, stream
from torch.utils.data import DataLoader

import drivetrain

model = make_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(stream, batch_size=32, collate_fn=collate)
defaults = {"global_batch_size": 32, "micro_batch_size": 16, "num_train_epochs": 2}
config = drivetrain.load_config(defaults=defaults)
loop = drivetrain.prepare(model, optimizer, loader, config)

for step in loop.steps():
    for x, y in step:
        loop.backward(F.cross_entropy(loop.model(x), y))
    loop.step()

if loop.is_main:
    print("losses", json.dumps(loop.history.losses))
