# drivetrain train --nproc-per-node 2 after.py
import json

import torch
from module import Digits

from drivetrain import EarlyStopping, Task, Trainer, load_config

torch.manual_seed(0)
defaults = {"global_batch_size": 32, "num_train_epochs": 6}
hooks = [EarlyStopping("val_loss", patience=3)]
trainer = Trainer(Task.from_lightning(Digits()), load_config(defaults=defaults), hooks)
history = trainer.fit()
if trainer.is_main:
    print("losses", json.dumps(history.losses))
    print("metrics", json.dumps(history.evaluations[-1].metrics))
