# drivetrain train --nproc-per-node 2 after.py
import json

import torch
from module import GPT, STEPS, Windows, get_lr, val

import drivetrain

torch.manual_seed(1337)
model = GPT()
optimizer = model.configure_optimizers(0.1, 1e-2, (0.9, 0.95))
defaults = {
    "global_batch_size": 16,
    "micro_batch_size": 4,
    "max_steps": STEPS,
    "optimization": {"max_grad_norm": 1.0, "lr_scheduler_type": "none"},
}
config = drivetrain.load_config(defaults=defaults)
loop = drivetrain.prepare(model, optimizer, Windows(), config)

for step in loop.steps():
    for group in loop.optimizer.param_groups:
        group["lr"] = get_lr(loop.step_number)
    for x, y in step:
        loop.backward(loop.model(x, y)[1])
    loop.step()

result = loop.evaluate(val, lambda model, batch: {"val_loss": model(*batch)[1]})
if loop.is_main:
    print("losses", json.dumps(loop.history.losses))
    print("metrics", json.dumps(result.metrics))
