"""Text from a trained run: python examples/applications/language/sample.py RUN ["Beginning"]."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer
from train import CONTEXT, DATA, END, GPT


@torch.no_grad()
def main(run: str, beginning: str = "The scheduler", num_tokens: int = 80) -> None:
    tokenizer = Tokenizer.from_file(str(DATA / "tokenizer.json"))
    model = GPT().eval()
    model.load_state_dict(torch.load(Path(run) / "checkpoints/weights.pt", weights_only=True))
    torch.manual_seed(0)
    ids = tokenizer.encode(beginning).ids
    for _ in range(num_tokens):
        logits = model(torch.tensor([ids[-CONTEXT:]]))[0, -1] / 0.8
        logits[logits < logits.topk(40).values[-1]] = -torch.inf
        ids.append(int(torch.multinomial(logits.softmax(0), 1)))
        if ids[-1] == END:
            break
    print(tokenizer.decode(ids))


if __name__ == "__main__":
    main(*sys.argv[1:3])
