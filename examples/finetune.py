r"""LoRA: train an adapter (peft) on a frozen Llama that is sharded and read from files.

    python examples/finetune.py --make-base base
    drivetrain train examples/finetune.py --nproc-per-node 2 \
        parallel.strategy=fsdp model.pretrained=base

The run writes the adapter to `adapter/` and the model with the merged adapter to `merged/`.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch
from llama import SIZES, RandomTokens, loss, make
from peft import LoraConfig, get_peft_model
from torch import nn

from drivetrain import Task, Trainer, load_config


class Counting(RandomTokens):
    """Sequences to learn: each token is the previous one plus one."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return (super().__getitem__(index)[:1] + torch.arange(self.length)) % self.vocabulary


def adapted(size: str, length: int, rank: int) -> nn.Module:
    lora = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
    model: Any = make(size, length)
    return get_peft_model(model, lora)


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--rank", type=int, default=8, help="of the adapter's matrices")
    parser.add_argument("--make-base", metavar="FOLDER", help="only write a model to start from")
    options, words = parser.parse_known_args()
    if options.make_base:
        torch.manual_seed(0)
        base: Any = make(options.size, options.length)
        base.save_pretrained(options.make_base)
        return
    config = load_config(
        argv=words,
        defaults={
            "name": "finetune",
            "global_batch_size": 16,
            "micro_batch_size": 4,
            "max_steps": 60,
            "optimization": {"learning_rate": 1e-2},
            "checkpoint": {"contents": "trained"},
        },
    )
    model = partial(adapted, options.size, options.length, options.rank)
    trainer = Trainer(Task(model, loss), config)
    trainer.fit(Counting(SIZES[options.size][-1], options.length))
    trainer.save_pretrained(f"{trainer.run_dir}/adapter")
    trainer.save_pretrained(f"{trainer.run_dir}/merged", merge_adapter=True)


if __name__ == "__main__":
    main()
