"""Several models trained together, each with its own optimizer, for example GANs.

A loss of one model may run through another, which must stay unaffected: backward goes only to the
weights of one model (`inputs` of torch.autograd.backward), and its gradients are reduced in that
backward, or after it. The models are called without a wrapper, which would have to know in forward
which model's backward follows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn

from drivetrain.core.errors import ConfigError, Problem
from drivetrain.parallel.clock import Waiting
from drivetrain.parallel.model import NOTHING, ParallelModel, Wanted, every_one


class ModelsByName(nn.ModuleDict):
    """The models that the user passes: `{"G": generator, "D": critic}`."""

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        for name in models:
            if not isinstance(name, str) or not name.isidentifier():
                rule, remedy = "is not a valid model name", "use letters and digits, like G"
                raise ConfigError([Problem("model", rule, remedy, repr(name))])
        if len({id(model) for model in models.values()}) < len(models):
            rule, remedy = "is passed under two names", "pass each model once"
            raise ConfigError([Problem("model", rule, remedy, ", ".join(models))])
        super().__init__(dict(models))


class SeveralModels(ParallelModel):
    """Each model is distributed separately; they are evaluated, compared and saved together."""

    def __init__(self, parts: Mapping[str, ParallelModel]) -> None:
        self.parts = dict(parts)
        self.inner = ModelsByName({name: part.inner for name, part in parts.items()})
        self.module = self.inner
        self.evaluated: Any = self.inner
        first = next(iter(parts.values()))
        self.counts = first.counts
        self.forwards_in_lockstep = first.forwards_in_lockstep
        self.needs_every_turn = first.needs_every_turn
        self.loss_multiplier = first.loss_multiplier

    def micro_batch(self, index: int, *, is_last: bool) -> AbstractContextManager[None]:
        """Tell each part; none has anything to do before its backward."""
        for part in self.parts.values():
            part.micro_batch(index, is_last=is_last)
        return NOTHING

    def whole_tensors(self, wanted: Wanted = every_one) -> Iterator[tuple[str, Any]]:
        """Yield all models' tensors, prefixed with the models' names."""
        for name, part in self.parts.items():
            for key, value in part.whole_tensors(partial(_is_wanted, wanted, name)):
                yield f"{name}.{key}", value

    def notes(self) -> list[str]:
        """Return every model's notes, prefixed with its name."""
        return [f"{name}: {note}" for name, part in self.parts.items() for note in part.notes()]

    def watch_waits(self, waiting: Waiting) -> None:
        """Do nothing: each part's engine does this."""


def _is_wanted(wanted: Wanted, model: str, name: str) -> bool:
    return wanted(f"{model}.{name}")


def backward_to(model: nn.Module, loss: torch.Tensor) -> None:
    """Accumulate gradients of one model's weights only, not of others in the loss."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    torch.autograd.backward(loss, inputs=trained)
