# drivetrain train --nproc-per-node 2 after.py
import json

import torch
import torch.nn.functional as F
from module import Clip, data
from torch.utils.data import DataLoader

import drivetrain
from drivetrain import gather

torch.manual_seed(0)
model = Clip()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
config = drivetrain.load_config(defaults={"global_batch_size": 64, "num_train_epochs": 1})
loop = drivetrain.prepare(model, optimizer, DataLoader(data), config)

for step in loop.steps():
    for upper, lower in step:
        ups, downs, scale = loop.model(upper, lower)
        logits = scale * gather(ups) @ gather(downs).T
        own = torch.arange(len(logits))
        loss = (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2
        loop.backward(loss)
    loop.step()

if loop.is_main:
    print("losses", json.dumps(loop.history.losses))
