"""Subject: what is profiled. Functions that create a model, its batch, loss and optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


def default_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return the default optimizer of a task."""
    return torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)


@dataclass(frozen=True)
class Subject:
    """A training step as functions that can be called on fake tensors."""

    name: str
    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Any], Any]
    """Returns a tensor, or a sum with its count."""
    batch: Callable[[int, float], Any]
    """`batch(samples, length)` returns plain tensors; `length` is a fraction of the full length."""
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = default_optimizer
    tokens_per_sample: int | None = None
    """For throughput in tokens; None if samples are not sequences."""
    varies_length: bool = False
    """Whether `batch` can return shorter sequences."""
    expert_imbalance: float = 1.0
    """Tokens sent to a rank's experts, as a multiple of an even share."""


def causal_lm_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Next-token cross-entropy of a Hugging Face model, in fp32 like its own loss."""
    logits = model(input_ids=batch[0], use_cache=False).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[1].flatten())


def token_batch(vocabulary: int, sequence_length: int) -> Callable[[int, float], Any]:
    """Return a function that creates batches of token ids with their targets."""

    def batch(samples: int, length: float) -> Any:
        shape = (samples, max(1, round(sequence_length * length)))
        ids = torch.zeros(shape, dtype=torch.int64)
        return ids.clamp(max=vocabulary - 1), ids.clone()

    return batch
