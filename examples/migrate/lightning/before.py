# python before.py
import json

import lightning
import torch
from module import Digits, DigitsData


class Losses(lightning.Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):  # type: ignore[no-untyped-def]
        self.seen.append(outputs["loss"].item())


torch.manual_seed(0)
losses = Losses()
trainer = lightning.Trainer(
    max_epochs=2,
    accelerator="cpu",
    devices=1,
    gradient_clip_val=1.0,
    callbacks=[losses],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(Digits(), DigitsData())
print("losses", json.dumps(losses.seen))
