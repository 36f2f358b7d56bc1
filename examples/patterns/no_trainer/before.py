# python before.py
import json
import math

import torch
from module import make_model, make_optimizer, train, val
from torch.utils.data import DataLoader
from transformers import default_data_collator, get_scheduler

torch.manual_seed(0)
model = make_model()
optimizer = make_optimizer(model)
scheduler = get_scheduler("linear", optimizer, num_warmup_steps=4, num_training_steps=24)
loader = DataLoader(train, collate_fn=default_data_collator, batch_size=8)
accumulation = 2

losses = []
for _ in range(1):
    model.train()
    parts = []
    for number, batch in enumerate(loader):
        loss = model(**batch).loss
        (loss / accumulation).backward()
        parts.append(loss.item())
        if (number + 1) % accumulation == 0:
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(sum(parts) / accumulation)
            parts = []

model.eval()
with torch.no_grad():
    val_loader = DataLoader(val, collate_fn=default_data_collator, batch_size=8)
    found = [model(**batch).loss.item() for batch in val_loader]
val_loss = sum(found) / len(found)
model.save_pretrained("trained")
print("losses", json.dumps(losses))
print("metrics", json.dumps({"val_loss": val_loss, "perplexity": math.exp(val_loss)}))
