r"""LoRA on a base that has not seen this text.

drivetrain train --nproc-per-node 2 --run-dir runs/hwmon \
    examples/applications/finetuning/finetune.py model.pretrained=runs/base/model

`model.pretrained` is a folder that `save_pretrained` wrote, or a hub id (`owner/name`). The run
leaves the adapter in `adapter/` and the model with the adapter in its weights in `merged/`.
"""

from __future__ import annotations

from functools import partial

from peft import LoraConfig, get_peft_model
from pretrain import Packed, arguments, held_out, loss
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from drivetrain import Task, Trainer, load_config


def adapted(shape: AutoConfig, rank: int) -> nn.Module:
    """Without weights: the base's are read by `model.pretrained`, each rank its shards."""
    lora = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
    return get_peft_model(AutoModelForCausalLM.from_config(shape), lora)


def end_of(shape: AutoConfig) -> int:
    """The token that closes a document; some models have several, the first is the text's."""
    end = shape.eos_token_id
    return end[0] if isinstance(end, list) else end


def main() -> None:
    parser = arguments()
    parser.add_argument("--rank", type=int, default=8, help="of the adapter's matrices")
    parser.add_argument("--shape", help="a folder with a config.json alone: to plan and rehearse")
    asked, words = parser.parse_known_args()
    config = load_config(
        argv=words,
        defaults={
            "name": "finetuned",
            "global_batch_size": 8,
            "micro_batch_size": 4,
            "max_steps": 40,
            "optimization": {
                "learning_rate": 5e-3,
                "lr_scheduler_type": "cosine",
                "warmup_steps": 5,
                "max_grad_norm": 1.0,
            },
            "evaluation": {"every_steps": 10, "batch_size": 16, "max_samples": 56},
            "checkpoint": {"contents": "trained"},
        },
    )
    base = asked.shape or config.config.model.pretrained
    if base is None:
        raise SystemExit("model.pretrained=FOLDER or owner/name: which model is to be fine-tuned?")
    shape = AutoConfig.from_pretrained(base)
    tokenizer = None if asked.shape else AutoTokenizer.from_pretrained(base)
    task = Task(partial(adapted, shape, asked.rank), loss, tokenizer=tokenizer)
    trainer, end = Trainer(task, config), end_of(shape)
    data = Packed("train", asked.new, asked.context, end)
    trainer.fit(data, held_out(asked.old, asked.new, asked.context, end))
    trainer.save_pretrained(f"{trainer.run_dir}/adapter")
    trainer.save_pretrained(f"{trainer.run_dir}/merged", merge_adapter=True)


if __name__ == "__main__":
    main()
