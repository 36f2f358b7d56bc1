"""Dropout switched off, for comparisons in which it cannot be the same.

Ranks that share a layer, a sequence or a model's depth draw masks for their own part: right, but
not the masks one device would have drawn.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from drivetrain.train.hooks import Hook
from drivetrain.train.trainer import Trainer


class WithoutDropout(Hook):
    """For the process it is in: it is there for nothing but the comparison."""

    def on_fit_start(self, trainer: Trainer) -> None:  # noqa: ARG002
        """nn.Dropout goes through the first; attention has its own."""
        attend = F.scaled_dot_product_attention

        def without(*args: Any, **kwargs: Any) -> torch.Tensor:
            kwargs.pop("dropout_p", None)
            attended: torch.Tensor = attend(*args[:4], **kwargs)
            return attended

        F.dropout = _unchanged  # type: ignore[assignment]
        if not isinstance(attend, type(without)):
            F.scaled_dot_product_attention = without


def _unchanged(x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return x
