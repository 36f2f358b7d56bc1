"""The model as it is, on one rank: nothing is sent. The yardstick for every strategy."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from drivetrain.parallel.model import NOTHING, ParallelModel
from drivetrain.parallel.parts import local_parts, total_norm
from drivetrain.parallel.several_models import backward_to


class SingleModel(ParallelModel):
    """One rank, the user's own module."""

    can_replay = True

    def __init__(self, model: nn.Module, *, counts: bool = True) -> None:
        self.module = model
        self.inner = model
        self.evaluated: Any = model
        self.counts = counts

    def micro_batch(self, index: int, *, is_last: bool) -> AbstractContextManager[None]:
        """Gradients add up by themselves."""
        return NOTHING

    def finish_gradients(self) -> None:
        """They are complete."""

    def total_norm(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """Of the gradients at hand; layers that ranks share are counted whole."""
        return total_norm(gradients)

    def local(self, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """All of them, or this rank's part of a shared layer's."""
        return local_parts(gradients)


class SingleOfSeveral(SingleModel):
    """One of several models, on one rank."""

    can_replay = False

    def backward(self, loss: torch.Tensor) -> None:
        """To its own weights."""
        backward_to(self.inner, loss)
