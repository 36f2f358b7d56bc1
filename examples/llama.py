"""Hugging Face's Llama from its config, on random tokens: any size, for rehearsals and benchmarks.

drivetrain train examples/llama.py --nproc-per-node 2
drivetrain rehearse examples/llama.py --size 8b --world-size 4096 parallel.strategy=fsdp
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from drivetrain import Task, Total, Trainer, load_config

# hidden size, layers, heads, key-value heads, intermediate size, vocabulary
SIZES = {
    "tiny": (64, 4, 4, 4, 128, 256),
    "1b": (2048, 16, 32, 8, 8192, 128_256),
    "8b": (4096, 32, 32, 8, 14_336, 128_256),
    "70b": (8192, 80, 64, 8, 28_672, 128_256),
    "405b": (16_384, 126, 128, 8, 53_248, 128_256),
}


class RandomTokens(Dataset[torch.Tensor]):
    """Random sequences; an index always gives the same one."""

    def __init__(self, vocabulary: int, length: int) -> None:
        self.vocabulary, self.length = vocabulary, length

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(index)
        return torch.randint(self.vocabulary, (self.length,), generator=generator)


def make(size: str, length: int) -> nn.Module:
    hidden, layers, heads, kv_heads, intermediate, vocabulary = SIZES[size]
    build: Callable[[LlamaConfig], nn.Module] = LlamaForCausalLM
    return build(
        LlamaConfig(
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            intermediate_size=intermediate,
            vocab_size=vocabulary,
            max_position_embeddings=length,
            tie_word_embeddings=False,
            use_cache=False,
        )
    )


def loss(model: nn.Module, ids: torch.Tensor) -> Total:
    logits = model(input_ids=ids).logits[:, :-1]
    total = nn.functional.cross_entropy(
        logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="sum"
    )
    return Total(total, ids[:, 1:].numel())


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--length", type=int, default=64)
    options, words = parser.parse_known_args()
    config = load_config(
        argv=words,
        defaults={
            "name": "llama",
            "global_batch_size": 16,
            "micro_batch_size": 1,
            "max_steps": 20,
            "optimization": {"learning_rate": 1e-3, "max_grad_norm": 1.0},
        },
    )
    data = RandomTokens(SIZES[options.size][-1], options.length)
    Trainer(Task(lambda: make(options.size, options.length), loss), config).fit(data)


if __name__ == "__main__":
    main()
