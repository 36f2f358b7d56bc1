"""The model that is started: as a Llama is built, 607 million parameters."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

PARTS = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 46,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 8000,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "use_cache": False,
}


def make_model() -> nn.Module:
    """By Hugging Face's classes, from a config."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model: nn.Module = LlamaForCausalLM(LlamaConfig(**PARTS))  # type: ignore[arg-type, no-untyped-call]
    return model


def num_bytes() -> dict[str, int]:
    """Of all weights in fp32, of the largest unit fsdp gathers, and of the files in bf16."""
    with torch.device("meta"):
        model = make_model()
    weights = sum(p.numel() for p in model.parameters())
    blocks = [sum(p.numel() for p in b.parameters()) for b in model.model.layers]  # type: ignore[union-attr]
    largest = max(*blocks, weights - sum(blocks))
    return {"weights": 4 * weights, "largest_unit": 4 * largest, "files": 2 * weights}


def save_files(folder: Path) -> None:
    """A folder as Hugging Face writes it, in several files."""
    torch.manual_seed(0)
    model = make_model().to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="300MB")  # type: ignore[operator]
