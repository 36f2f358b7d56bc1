"""A small GPT-2, its blocks of text and its optimizer, as transformers' no-trainer example has them."""

from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

BLOCK = 32
text = torch.tensor(list(Path(torch.__file__).read_bytes()[: 416 * BLOCK]))
blocks = text.view(-1, BLOCK)[torch.randperm(416, generator=torch.Generator().manual_seed(0))]
samples = [{"input_ids": block, "labels": block} for block in blocks]
train, val = samples[:384], samples[384:]


def make_model():
    size = GPT2Config(vocab_size=256, n_positions=BLOCK, n_embd=32, n_layer=2, n_head=2)
    size.resid_pdrop = size.embd_pdrop = size.attn_pdrop = 0.0
    return GPT2LMHeadModel(size)


def make_optimizer(model):
    decay = [p for n, p in model.named_parameters() if not ("bias" in n or "ln_" in n)]
    rest = [p for n, p in model.named_parameters() if "bias" in n or "ln_" in n]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=5e-3)
