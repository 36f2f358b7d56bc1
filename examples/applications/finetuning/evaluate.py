"""Before and after, by transformers and peft alone: losses on held-out text, and a sample.

python examples/applications/finetuning/evaluate.py runs/base/model runs/hwmon
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from finetune import end_of
from peft import PeftModel
from pretrain import arguments, held_out, loss
from torch.utils.data import DataLoader, Subset
from transformers import AutoModelForCausalLM, AutoTokenizer


@torch.no_grad()
def mean_loss(model: Any, windows: Any, most: int) -> float:
    """Per predicted token, in double precision as the run's own evaluation adds."""
    some = Subset(windows, range(min(most, len(windows))))
    totals = [loss(model, batch) for batch in DataLoader(some, 16)]
    return sum(t.sum.double() for t in totals).item() / sum(int(t.count) for t in totals)


@torch.no_grad()
def sample(model: Any, tokenizer: Any, beginning: str, num_tokens: int = 60) -> str:
    ids = torch.tensor([tokenizer(beginning, add_special_tokens=False).input_ids])
    torch.manual_seed(0)
    found = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        do_sample=True,
        top_k=40,
        temperature=0.8,
    )
    return tokenizer.decode(found[0], skip_special_tokens=True)


def main() -> None:
    parser = arguments()
    parser.add_argument("base", help="the model that was fine-tuned")
    parser.add_argument("run", type=Path, help="its fine-tuning: adapter/ and merged/ are in it")
    parser.add_argument("--samples", type=int, default=56, help="windows of each text, at most")
    parser.add_argument("--beginning", default="Kernel driver")
    asked = parser.parse_args()
    load = AutoModelForCausalLM.from_pretrained
    models = {
        "base": load(asked.base),
        "base + adapter": PeftModel.from_pretrained(load(asked.base), asked.run / "adapter"),
        "merged": load(asked.run / "merged"),
    }
    sets = held_out(asked.old, asked.new, asked.context, end_of(models["base"].config))
    print(f"{'':<14}  {'old text':>9}  {'new text':>9}")
    for name, model in models.items():
        model.eval()
        losses = [mean_loss(model, each, asked.samples) for each in sets.values()]
        print(f"{name:<14}  " + "  ".join(f"{each:9.4f}" for each in losses))
    tokenizer = AutoTokenizer.from_pretrained(asked.run / "merged")
    for name in ("base", "merged"):
        print(f"\n{name}:\n{sample(models[name], tokenizer, asked.beginning)}")


if __name__ == "__main__":
    main()
