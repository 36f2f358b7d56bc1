# drivetrain train --nproc-per-node 2 after.py
import json

import torch
from module import data, make_model
from torch.utils.data import DataLoader

import drivetrain

model = make_model()
optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
defaults = {
    "global_batch_size": 16,
    "micro_batch_size": 8,
    "num_train_epochs": 1,
    "checkpoint": {"contents": "trained"},
}
config = drivetrain.load_config(defaults=defaults)
loop = drivetrain.prepare(model, optimizer, DataLoader(data), config)

for step in loop.steps():
    for batch in step:
        loop.backward(loop.model(**batch).loss)
    loop.step()

loop.save_pretrained("adapter")
if loop.is_main:
    print("losses", json.dumps(loop.history.losses))
