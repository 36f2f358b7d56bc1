"""What a comparison changes in the runs it compares."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from drivetrain.train.hooks import Hook
from drivetrain.train.trainer import Trainer

_UNITS = 4
"""In the last place: somewhat more than a layout does, so that it is not missed."""


class Nudged(Hook):
    """The last bits of the gradients are changed, the same in every run.

    Another layout adds the same terms in another order: last bits differ, and nothing else. Where
    that alone makes one process part from itself, as with a ReLU that 1e-9 puts on the other side
    of 0, a late parting says nothing of the layout.
    """

    def on_before_optimizer_step(self, trainer: Trainer, step: int) -> None:
        """Each element goes up or down by a few units in its last place, or stays."""
        if trainer.assembly is None:
            return
        generator = torch.Generator().manual_seed(step)
        for parameter in trainer.assembly.engine.spread.inner.parameters():
            gradient = parameter.grad
            if gradient is None:
                continue
            units = torch.randint(-_UNITS, _UNITS + 1, gradient.shape, generator=generator)
            gradient.mul_(1 + torch.finfo(gradient.dtype).eps * units.to(gradient))


class WithoutDropout(Hook):
    """Dropout switched off in this process, for comparisons in which it cannot be the same.

    Ranks that share a layer, a sequence or a model's depth draw masks for their own part: right,
    but not the masks one device would have drawn.
    """

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
