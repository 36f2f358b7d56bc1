# drivetrain train --nproc-per-node 2 after.py
import json
import math

import torch
from module import make_model, make_optimizer, train, val
from torch.utils.data import DataLoader
from transformers import default_data_collator, get_scheduler

import drivetrain

torch.manual_seed(0)
model = make_model()
optimizer = make_optimizer(model)
scheduler = get_scheduler("linear", optimizer, num_warmup_steps=4, num_training_steps=24)
loader = DataLoader(train, collate_fn=default_data_collator)
defaults = {"global_batch_size": 16, "micro_batch_size": 8, "num_train_epochs": 1}
config = drivetrain.load_config(defaults=defaults)
loop = drivetrain.prepare(model, optimizer, loader, config, scheduler=scheduler)

for step in loop.steps():
    for batch in step:
        loop.backward(loop.model(**batch).loss)
    loop.step()

val_loader = DataLoader(val, collate_fn=default_data_collator)
result = loop.evaluate(val_loader, lambda model, batch: {"val_loss": model(**batch).loss})
val_loss = result.metrics["val_loss"]
loop.save_pretrained("trained")
if loop.is_main:
    print("losses", json.dumps(loop.history.losses))
    print("metrics", json.dumps({"val_loss": val_loss, "perplexity": math.exp(val_loss)}))
