"""A frozen GPT-2 with peft's LoRA, and its text: the same file before and after."""

from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

text = torch.tensor(list(Path(torch.__file__).read_bytes()[: 384 * 32])).view(384, 32)
data = [{"input_ids": row, "labels": row} for row in text]


def make_model():
    torch.manual_seed(0)
    size = GPT2Config(vocab_size=256, n_positions=32, n_embd=32, n_layer=2, n_head=2)
    size.resid_pdrop = size.embd_pdrop = size.attn_pdrop = 0.0
    lora = LoraConfig(r=4, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True)
    return get_peft_model(GPT2LMHeadModel(size), lora)
