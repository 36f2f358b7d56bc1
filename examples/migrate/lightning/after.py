# python after.py, or drivetrain train --nproc-per-node 2 after.py
import json

import torch
from module import Digits, DigitsData

from drivetrain import Task, Trainer, load_config

torch.manual_seed(0)
defaults = {
    "global_batch_size": 64,
    "num_train_epochs": 2,
    "optimization": {"max_grad_norm": 1.0},
}
trainer = Trainer(Task.from_lightning(Digits(), DigitsData()), load_config(defaults=defaults))
history = trainer.fit()
if trainer.is_main:
    print("losses", json.dumps(history.losses))
