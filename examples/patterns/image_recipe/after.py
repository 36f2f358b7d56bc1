# drivetrain train --nproc-per-node 2 after.py
import json

import torch
from module import STEPS, MixUp, loss, make_model, right, val
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader

from drivetrain import EMA, Task, Total, Trainer, load_config


def seeded_model():
    torch.manual_seed(0)
    return make_model()


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-4)


def schedule(optimizer, total_steps):
    return OneCycleLR(optimizer, max_lr=0.2, total_steps=total_steps)


def metrics(model, batch):
    x, y = batch
    logits = model(x)
    return {f"top{k}": Total(right(logits, y, k), len(y)) for k in (1, 5)}


defaults = {
    "global_batch_size": 32,
    "max_steps": STEPS,
    "parallel": {"sync_batch_norm": True},
}
task = Task(seeded_model, loss, optimizer=optimizer, metrics=metrics, schedule=schedule)
trainer = Trainer(task, load_config(defaults=defaults), hooks=[EMA(decay=0.9)])
history = trainer.fit(DataLoader(MixUp()), val)
if trainer.is_main:
    print("losses", json.dumps(history.losses))
    print("metrics", json.dumps(history.evaluations[-1].metrics))
