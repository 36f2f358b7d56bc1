"""The unmodified model on one rank, without communication: the reference for every strategy."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from drivetrain.parallel.model import NOTHING, ParallelModel
from drivetrain.parallel.parts import local_parts, total_norm
from drivetrain.parallel.several_models import backward_to


class SingleModel(ParallelModel):
    """The user's own module on one rank."""

    can_replay = True

    def __init__(self, model: nn.Module, *, counts: bool = True) -> None:
        self.module = model
        self.inner = model
        self.evaluated: Any = model
        self.counts = counts

    def micro_batch(self, index: int, *, is_last: bool) -> AbstractContextManager[None]:
        """Do nothing: autograd accumulates gradients by itself."""
        return NOTHING

    def finish_gradients(self) -> None:
        """Do nothing: gradients are complete."""

    def total_norm(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """Return the 2-norm of this rank's gradients; layers sharded over ranks count in full."""
        return total_norm(gradients)

    def local(self, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the gradients; of a layer that is sharded over ranks, this rank's shard."""
        return local_parts(gradients)


class SingleOfSeveral(SingleModel):
    """One of several models, on one rank."""

    can_replay = False

    def backward(self, loss: torch.Tensor) -> None:
        """Add gradients to this model's own weights only."""
        backward_to(self.inner, loss)
