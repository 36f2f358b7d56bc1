"""The models that predictions are held against: small, of five kinds, as users bring them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from drivetrain.core.requirements import require
from drivetrain.plan.profile.sources import ResNet50
from drivetrain.plan.profile.subject import Subject

VOCABULARY, LENGTH, WIDTH, LAYERS = 1024, 128, 256, 4


class Block(nn.Module):
    """Attention and two layers, each with a norm before and a way around."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.head_size = heads, width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of the ways."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (-1, 3, self.head_size)).unbind(-2)
        attended = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        after: torch.Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return after


class GPT(nn.Module):
    """A decoder, with its own plan for tensor parallelism."""

    tp_plan: ClassVar[dict[str, str]] = {
        "blocks.*.qkv": "colwise",
        "blocks.*.out": "rowwise",
        "blocks.*.up": "colwise",
        "blocks.*.down": "rowwise",
        "head": "colwise_gather",
    }

    def __init__(
        self,
        width: int = WIDTH,
        layers: int = LAYERS,
        heads: int = 4,
        vocabulary: int = VOCABULARY,
        length: int = LENGTH,
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits."""
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def _plain_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    logits = model(batch[0])
    return F.cross_entropy(logits.flatten(0, -2), batch[1].flatten())


def _hugging_face_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    logits = model(input_ids=batch[0]).logits
    return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())


def _hugging_face(kind: str, width: int = WIDTH, layers: int = LAYERS) -> nn.Module:
    transformers = require("transformers", extra="plan")
    common = {"vocab_size": VOCABULARY, "tie_word_embeddings": False}
    sizes: dict[str, dict[str, Any]] = {
        "gpt2": {"n_layer": layers, "n_embd": width, "n_head": 4, "n_positions": LENGTH},
        "llama": {
            "num_hidden_layers": layers,
            "hidden_size": width,
            "intermediate_size": 3 * width,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": LENGTH,
        },
        "bert": {
            "num_hidden_layers": layers,
            "hidden_size": width,
            "intermediate_size": 4 * width,
            "num_attention_heads": 4,
            "max_position_embeddings": LENGTH,
        },
    }
    off = {"use_cache": False} if kind != "bert" else {}
    config = transformers.AutoConfig.for_model(kind, **common, **sizes[kind], **off)
    makers = {"bert": transformers.AutoModelForMaskedLM}
    made: nn.Module = makers.get(kind, transformers.AutoModelForCausalLM).from_config(config)
    return made


@dataclass(frozen=True)
class Bench:
    """One model with its loss and a kind of data."""

    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Any], torch.Tensor]
    side: int = 0
    """Of an image; 0: tokens."""

    def batch(self, samples: int, length: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        """Zeros of the right shape."""
        if self.side:
            labels = torch.zeros(samples, dtype=torch.int64)
            return torch.zeros(samples, 3, self.side, self.side), labels
        ids = torch.zeros(samples, round(LENGTH * length), dtype=torch.int64)
        return ids, ids.clone()

    def dataset(self, samples: int) -> TensorDataset:
        """Something to train on."""
        return TensorDataset(*self.batch(samples))


MODELS: dict[str, Bench] = {
    "gpt": Bench(GPT, _plain_loss),
    "resnet": Bench(lambda: ResNet50(100, (1, 1, 1, 1)), _plain_loss, side=64),
    "hf_gpt2": Bench(lambda: _hugging_face("gpt2"), _hugging_face_loss),
    "hf_llama": Bench(lambda: _hugging_face("llama"), _hugging_face_loss),
    "hf_bert": Bench(lambda: _hugging_face("bert"), _hugging_face_loss),
    # held out: never looked at while the planner was written
    "gpt_wide": Bench(lambda: GPT(384, 3), _plain_loss),
    "llama_deep": Bench(lambda: _hugging_face("llama", 192, 8), _hugging_face_loss),
}


def make_optimizer(name: str, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """adamw, sgd (with momentum), or adagrad."""
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)
    if name == "adagrad":
        return torch.optim.Adagrad(parameters, lr=1e-3)
    return torch.optim.AdamW(parameters, lr=1e-3)


def subject_of(name: str, optimizer: str) -> Subject:
    """As the planner takes it."""
    bench = MODELS[name]
    return Subject(
        name,
        bench.model,
        bench.loss,
        bench.batch,
        lambda model: make_optimizer(optimizer, list(model.parameters())),
        tokens_per_sample=None if bench.side else LENGTH,
    )
