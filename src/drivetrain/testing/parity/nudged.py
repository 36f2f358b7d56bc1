"""The reference once more, with the last bits of its gradients changed.

Another layout adds the same terms in another order: last bits differ, and nothing else. Where that
alone makes one process part from itself, as with a ReLU that 1e-9 puts on the other side of 0, a
late parting says nothing of the layout.
"""

from __future__ import annotations

import torch

from drivetrain.train.hooks import Hook
from drivetrain.train.trainer import Trainer

_UNITS = 4
"""In the last place: somewhat more than a layout does, so that it is not missed."""


class Nudged(Hook):
    """The same bits are changed in every run."""

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
