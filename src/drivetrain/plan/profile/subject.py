"""Subject: what is profiled. A model, its loss on a batch, its optimizer; none of it made yet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


def default_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """What a task has when it says nothing."""
    return torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)


@dataclass(frozen=True)
class Subject:
    """A training step, in functions that can be called on fake tensors."""

    name: str
    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Any], Any]
    """A tensor, or a sum with its count."""
    batch: Callable[[int, float], Any]
    """`batch(samples, length)`: plain tensors; `length` is a fraction of the whole."""
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = default_optimizer
    tokens_per_sample: int | None = None
    """For throughput in tokens; None where a sample is no sequence."""
    varies_length: bool = False
    """Whether `batch` can make shorter sequences."""
    expert_imbalance: float = 1.0
    """Tokens that a rank's experts are sent, times an even share."""


def causal_lm_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Next-token cross-entropy of a Hugging Face model, in fp32, as its own loss takes it."""
    logits = model(input_ids=batch[0], use_cache=False).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[1].flatten())


def token_batch(vocabulary: int, sequence_length: int) -> Callable[[int, float], Any]:
    """Batches of token ids with their targets."""

    def batch(samples: int, length: float) -> Any:
        shape = (samples, max(1, round(sequence_length * length)))
        ids = torch.zeros(shape, dtype=torch.int64)
        return ids.clamp(max=vocabulary - 1), ids.clone()

    return batch
