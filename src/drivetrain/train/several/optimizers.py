"""Several optimizers combined into one, e.g. Muon for matrices and AdamW for the rest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from drivetrain.core.errors import ConfigError, Problem


class SeveralOptimizers(torch.optim.Optimizer):
    """Several optimizers as one: their groups and states in order, and a step that steps each.

    Groups and states are the optimizers' own objects, so a scheduler, a scaler and a checkpoint see
    a single optimizer.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = tuple(optimizers)
        try:
            super().__init__([group for each in optimizers for group in each.param_groups], {})
        except ValueError as error:  # torch's message for a parameter that two of them have
            remedy = "give each parameter to one optimizer"
            raise ConfigError([Problem("optimizer", str(error), remedy, self.kind)]) from error
        shared: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        for each in optimizers:
            shared.update(each.state)
            each.state = shared
        self.state = shared

    @property
    def kind(self) -> str:
        """Names of the optimizers' classes."""
        return " + ".join(type(each).__name__ for each in self.optimizers)

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Step each optimizer."""
        del closure
        for each in self.optimizers:
            each.step()


class OptimizersByName(SeveralOptimizers):
    """One optimizer per model; the script decides when each is stepped."""

    def __init__(self, by_name: Mapping[str, torch.optim.Optimizer]) -> None:
        super().__init__(list(by_name.values()))
        self.by_name = dict(by_name)


def as_one(made: Any) -> torch.optim.Optimizer:
    """Return one optimizer for what a task's function returned; ConfigError if it is not one."""
    several = list(made.values()) if isinstance(made, Mapping) else made
    several = several if isinstance(several, (list, tuple)) else [several]
    for each in several:
        if not isinstance(each, torch.optim.Optimizer):
            rule, remedy = "is not a torch optimizer", "return one, or a list or dict of them"
            raise ConfigError([Problem("optimizer", rule, remedy, type(each).__name__)])
    if not several:
        raise ConfigError([Problem("optimizer", "is an empty list", "return one", has_value=False)])
    return several[0] if len(several) == 1 else SeveralOptimizers(several)


def members(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, ...]:
    """Return the optimizers that step: the optimizer itself, or those it combines."""
    return optimizer.optimizers if isinstance(optimizer, SeveralOptimizers) else (optimizer,)


def kind_of(optimizer: torch.optim.Optimizer) -> str:
    """Return the optimizer's name for messages and contracts."""
    if isinstance(optimizer, SeveralOptimizers):
        return optimizer.kind
    return type(optimizer).__name__
