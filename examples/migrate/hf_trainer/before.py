# python before.py
import json
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

text = Path(torch.__file__).read_bytes()[: 512 * 33]
rows = torch.tensor(list(text)).view(512, 33)
labels = rows.clone()
labels[:, 0] = -100  # never a target; Trainer counts it as one otherwise
data = [{"input_ids": row, "labels": label} for row, label in zip(rows, labels, strict=True)]
size = GPT2Config(vocab_size=256, n_positions=64, n_embd=32, n_layer=2, n_head=2)
size.resid_pdrop = size.embd_pdrop = size.attn_pdrop = 0.0

torch.manual_seed(0)
model = GPT2LMHeadModel(size)
arguments = TrainingArguments(
    output_dir="runs",
    per_device_train_batch_size=8,
    gradient_accumulation_steps=2,
    num_train_epochs=1,
    learning_rate=5e-3,
    lr_scheduler_type="cosine",
    optim="adamw_torch",
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    use_cpu=True,
    disable_tqdm=True,
    train_sampling_strategy="sequential",
)
trainer = Trainer(model=model, args=arguments, train_dataset=data)
trainer.train()
model.save_pretrained("runs/trained")
print("losses", json.dumps([e["loss"] for e in trainer.state.log_history if "loss" in e]))
