# python before.py
import json

import lightning
import torch
from lightning.pytorch.callbacks import EarlyStopping
from module import Digits


class Losses(lightning.Callback):
    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.seen.append(outputs["loss"].item())


torch.manual_seed(0)
losses = Losses()
trainer = lightning.Trainer(
    max_epochs=6,
    accelerator="cpu",
    devices=1,
    callbacks=[losses, EarlyStopping("val_loss", patience=3)],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    num_sanity_val_steps=0,
)
trainer.fit(Digits())
names = ("val_loss", "val_accuracy")
print("losses", json.dumps(losses.seen))
print("metrics", json.dumps({name: float(trainer.callback_metrics[name]) for name in names}))
