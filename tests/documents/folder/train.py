"""A script as one writes it for Drivetrain: ten steps of a small model."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from drivetrain import Task, Trainer, load_config

torch.manual_seed(0)
pixels = torch.randn(64, 8)
data = TensorDataset(pixels, (pixels.sum(1) > 0).long())
config = load_config(
    defaults={
        "global_batch_size": 16,
        "max_steps": 10,
        "name": "one",
        "record.sinks": [],
        "record.system_every_s": None,
    }
)
trainer = Trainer(
    Task(
        model=lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)),
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
    ),
    config,
)
history = trainer.fit(data)
if trainer.is_main:
    layout = f"{trainer.config.parallel.strategy} on {dist.get_world_size()}"
    print(f"DONE {len(history.steps)} steps, {layout}", flush=True)
