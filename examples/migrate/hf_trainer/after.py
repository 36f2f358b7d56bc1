# python after.py, or drivetrain train --nproc-per-node 2 after.py
import json
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from drivetrain import Task, Trainer, config_from_training_arguments, load_config

text = Path(torch.__file__).read_bytes()[: 512 * 33]
rows = torch.tensor(list(text)).view(512, 33)
labels = rows.clone()
labels[:, 0] = -100  # never a target; Trainer counts it as one otherwise
data = [{"input_ids": row, "labels": label} for row, label in zip(rows, labels, strict=True)]
size = GPT2Config(vocab_size=256, n_positions=64, n_embd=32, n_layer=2, n_head=2)
size.resid_pdrop = size.embd_pdrop = size.attn_pdrop = 0.0


def make_model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(size)


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
)
config = load_config(defaults=config_from_training_arguments(arguments))
trainer = Trainer(Task(make_model, lambda model, batch: model(**batch).loss), config)
history = trainer.fit(DataLoader(data))  # in order, as before
if trainer.is_main:
    trainer.model.save_pretrained("runs/trained")
    print("losses", json.dumps(history.losses))
