"""Started by horovodrun: HorovodTrainer as the field's documents write it."""

import json
import sys

import horovod.torch as hvd
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import HorovodTrainer

hvd.init()
torch.manual_seed(hvd.rank())  # rank 0's weights are the ones that count
generator = torch.Generator().manual_seed(0)
pixels = torch.randn(64, 8, generator=generator)
data = TensorDataset(pixels, (pixels.sum(1) > 0).long())
trainer = HorovodTrainer(
    model=nn.Linear(8, 2),
    compression=hvd.Compression.fp16,
    verbose=hvd.rank() == 0,
    batch_size=8,
    tensorboard=False,
    tensorboard_dir=sys.argv[1],
)
history = trainer.fit(DataLoader(data, shuffle=True), DataLoader(data), epochs=3)
average = trainer.metric_average(hvd.rank(), name="ranks")
weights = [p.sum().item() for p in trainer.model.parameters()]
print("RESULT", json.dumps([hvd.rank(), len(history.steps), average, weights]))
