"""What a model computes for each micro-batch, so that other sizes give other numbers."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from drivetrain.parallel.batch_norm import batch_norms


def has_dropout(model: nn.Module) -> bool:
    return any(isinstance(m, _DropoutNd) and m.p > 0 for m in model.modules())


def per_micro_batch(model: nn.Module) -> tuple[str, ...]:
    """Return what depends on the micro-batch size, in words."""
    found = {"dropout masks": has_dropout(model), "batch norm's statistics": batch_norms(model)}
    return tuple(words for words, is_there in found.items() if is_there)
