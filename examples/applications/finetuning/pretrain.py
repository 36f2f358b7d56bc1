r"""A small Llama from scratch on the kernel's documentation, all but one part: a base to fine-tune.

python examples/applications/language/prepare.py --without 'hwmon/*' --out data/kernel
python examples/applications/language/prepare.py --only 'hwmon/*' \
    --tokenizer data/kernel/tokenizer.json --out data/hwmon
drivetrain train --nproc-per-node 2 --run-dir runs/base \
    examples/applications/finetuning/pretrain.py

The run leaves the model in `model/`, as `save_pretrained` writes one, tokenizer and all.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from drivetrain import Task, Total, Trainer, load_config

sys.path.append(str(Path(__file__).parents[1] / "language"))
from prepare import END as END_TOKEN
from train import CONTEXT, END, IGNORED, VOCABULARY, Packed

OLD, NEW = Path("data/kernel"), Path("data/hwmon")


def make(context: int) -> nn.Module:
    model: nn.Module = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=192,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=4,
            max_position_embeddings=context,
            bos_token_id=END,
            eos_token_id=END,
            pad_token_id=END,
        )
    )
    return model


def loss(model: nn.Module, batch: Any) -> Total:
    """Over all predicted tokens of the global batch, wherever they are."""
    ids, targets = batch
    logits = model(input_ids=ids, use_cache=False).logits
    total = F.cross_entropy(
        logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return Total(total, (targets != IGNORED).sum())


def held_out(old: Path, new: Path, context: int, end: int) -> dict[str, Packed]:
    """Documents that nothing was trained on, of the base's text and of the new one."""
    return {name: Packed("val", each, context, end) for name, each in (("old", old), ("new", new))}


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--old", type=Path, default=OLD, help="tokens of the base's text")
    parser.add_argument("--new", type=Path, default=NEW, help="tokens of the new text")
    parser.add_argument("--context", type=int, default=CONTEXT, help="tokens in a sample")
    return parser


def main() -> None:
    asked, words = arguments().parse_known_args()
    if not (asked.old / "train.npy").exists():
        raise SystemExit(f"{asked.old} has no tokens: see the first lines of {__file__}")
    config = load_config(
        argv=words,
        defaults={
            "name": "base",
            "seed": 1,
            "global_batch_size": 8,
            "micro_batch_size": 4,
            "max_steps": 150,
            "optimization": {
                "learning_rate": 3e-3,
                "lr_scheduler_type": "wsd",
                "warmup_steps": 10,
                "decay_steps": 50,
                "weight_decay": 0.1,
                "max_grad_norm": 1.0,
            },
            "evaluation": {"every_steps": 50, "batch_size": 16, "max_samples": 56},
        },
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(asked.old / "tokenizer.json"), eos_token=END_TOKEN
    )
    task = Task(partial(make, asked.context), loss, tokenizer=tokenizer)
    trainer = Trainer(task, config)
    data = Packed("train", asked.old, asked.context)
    trainer.fit(data, held_out(asked.old, asked.new, asked.context, END))
    trainer.save_pretrained(f"{trainer.run_dir}/model")


if __name__ == "__main__":
    main()
