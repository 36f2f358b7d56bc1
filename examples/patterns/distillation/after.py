# drivetrain train --nproc-per-node 2 after.py
import json

import torch
from module import Pupil, data, loss
from torch.utils.data import DataLoader

import drivetrain

torch.manual_seed(0)
model = Pupil()
optimizer = torch.optim.AdamW(model.student.parameters(), lr=1e-2)
defaults = {"global_batch_size": 32, "micro_batch_size": 16, "num_train_epochs": 1}
config = drivetrain.load_config(defaults=defaults)
loop = drivetrain.prepare(model, optimizer, DataLoader(data), config)

for step in loop.steps():
    for batch in step:
        loop.backward(loss(loop.model, batch))
    loop.step()

if loop.is_main:
    print("losses", json.dumps(loop.history.losses))
    print("metrics", json.dumps(loop.history.steps[-1].parts))
