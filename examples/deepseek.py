"""Hugging Face's DeepSeek-V3 from its config, on random tokens: 671 billion parameters or fewer.

drivetrain train examples/deepseek.py --nproc-per-node 2 parallel.strategy=fsdp parallel.ep=2
drivetrain rehearse examples/deepseek.py --size 671b --length 4096 --world-size 2048 \\
    parallel.strategy=fsdp parallel.pp=16 parallel.ep=64
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from llama import RandomTokens, loss
from torch import nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from drivetrain import Task, Trainer, load_config

# differences from the config's defaults, which describe the published model
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 4,
        "first_k_dense_replace": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "q_lora_rank": 32,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
    },
    "671b": {},
}


def make(config: DeepseekV3Config) -> nn.Module:
    build: Callable[[DeepseekV3Config], nn.Module] = DeepseekV3ForCausalLM
    return build(config)


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--length", type=int, default=64)
    options, argv = parser.parse_known_args()
    config = load_config(
        argv=argv,
        defaults={
            "name": "deepseek",
            "global_batch_size": 16,
            "micro_batch_size": 1,
            "max_steps": 20,
            "optimization": {"learning_rate": 1e-3, "max_grad_norm": 1.0},
        },
    )
    shape = DeepseekV3Config(
        **SIZES[options.size], max_position_embeddings=options.length, use_cache=False
    )
    data = RandomTokens(shape.vocab_size, options.length)
    Trainer(Task(lambda: make(shape), loss), config).fit(data)


if __name__ == "__main__":
    main()
