"""A small GPT, its data and its learning rate, in nanoGPT's manner: the same file before and after."""

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import IterableDataset

BLOCK, VOCAB, STEPS = 32, 65, 24
text = torch.randint(VOCAB, (4000,), generator=torch.Generator().manual_seed(0))
text[1::2] = (text[0::2] + 1) % VOCAB  # something to learn


def window(start):
    return text[start : start + BLOCK], text[start + 1 : start + BLOCK + 1]


class Windows(IterableDataset):
    """Windows from anywhere in the text, without end."""

    def __iter__(self):
        draws = torch.Generator().manual_seed(1337)
        while True:
            yield window(int(torch.randint(len(text) - BLOCK, (1,), generator=draws)))


val = [window(start) for start in range(0, 40 * BLOCK, BLOCK)]


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = self.qkv(self.ln_1(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(seen.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.ln_2(x))))


class GPT(nn.Module):
    def __init__(self, width=32, heads=2, layers=2):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, width), nn.Embedding(BLOCK, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCAB, bias=False)
        self.head.weight = self.tokens.weight  # tied
        for weight in self.parameters():
            if weight.dim() >= 2:
                nn.init.normal_(weight, std=0.02)

    def forward(self, x, y):
        hidden = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        logits = self.head(self.norm(self.blocks(hidden)))
        return logits, F.cross_entropy(logits.flatten(0, 1), y.flatten())

    def configure_optimizers(self, weight_decay, lr, betas):
        decay = [p for p in self.parameters() if p.dim() >= 2]
        rest = [p for p in self.parameters() if p.dim() < 2]
        groups = [
            {"params": decay, "weight_decay": weight_decay},
            {"params": rest, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=lr, betas=betas)


def get_lr(it, peak=1e-2, lowest=1e-3, warmup=4):
    if it < warmup:
        return peak * (it + 1) / (warmup + 1)
    done = (it - warmup) / (STEPS - warmup)
    return lowest + 0.5 * (1 + math.cos(math.pi * done)) * (peak - lowest)
