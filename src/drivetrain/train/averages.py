"""Averages: a moving average of the trained weights, sharded like the weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn

from drivetrain.checkpoint.export import AVERAGES
from drivetrain.parallel.model import ParallelModel, own_name
from drivetrain.parallel.parts import local_parts


class Averages:
    """Average of the weights after each step: `average += (weight - average) * (1 - decay)`.

    Shards are averaged as shards, and saved and resharded like the weights.
    """

    def __init__(self, spread: ParallelModel, decay: float, *, evaluate: bool) -> None:
        self.decay = decay
        self.is_evaluated = evaluate
        self.num_updates = 0
        self._spread = spread
        # the tensors that an optimizer holds: a strategy may swap in others for a forward
        weights = {
            own_name(name): parameter
            for name, parameter in spread.inner.named_parameters()
            if parameter.requires_grad
        }
        averages = {name: weight.detach().clone() for name, weight in weights.items()}
        self._tensors = {AVERAGES + name: average for name, average in averages.items()}
        self._weights = local_parts([weight.detach() for weight in weights.values()])
        self._averages = local_parts([*averages.values()])
        self._move = get_ema_multi_avg_fn(decay)
        self._is_applied = False

    def begin(self) -> None:
        """Start from the current weights, unless averages were restored."""
        if not self.num_updates:
            for average, weight in zip(self._averages, self._weights, strict=True):
                average.copy_(weight)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """This rank's part of the averages, by the names they are saved under."""
        self._refuse_applied("save")
        return self._tensors

    def _refuse_applied(self, what: str) -> None:
        if self._is_applied:
            raise RuntimeError(
                f"the model cannot {what} inside ema.applied(): leave that block first"
            )

    def update(self) -> None:
        """Update the averages after a step."""
        self._refuse_applied("train")
        self._move(self._averages, self._weights, self.num_updates)
        self.num_updates += 1

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Context in which the weights and the averages are swapped."""
        if self._is_applied:
            yield
            return
        self._is_applied = True
        self._exchange()
        try:
            yield
        finally:
            self._exchange()
            self._is_applied = False

    @torch.no_grad()
    def _exchange(self) -> None:
        self._spread.weights_change()
        for average, weight in zip(self._averages, self._weights, strict=True):
            aside = weight.clone()
            weight.copy_(average)
            average.copy_(aside)

    def state_dict(self) -> dict[str, Any]:
        return {"num_updates": self.num_updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the rest of the state, after the tensors."""
        self.num_updates = int(state["num_updates"])
