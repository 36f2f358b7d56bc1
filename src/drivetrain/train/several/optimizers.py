"""Several optimizers for parts of one model, as one: Muon for matrices, AdamW for the rest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from drivetrain.core.errors import ConfigError, Problem


class SeveralOptimizers(torch.optim.Optimizer):
    """Their groups and their states, in the order given, and one step that is each one's.

    Groups and states are the very objects that the optimizers use: a scheduler, a scaler and a
    checkpoint see one optimizer.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = tuple(optimizers)
        try:
            super().__init__([group for each in optimizers for group in each.param_groups], {})
        except ValueError as error:  # torch's words, for a parameter that two of them have
            remedy = "give each parameter to one optimizer"
            raise ConfigError([Problem("optimizer", str(error), remedy, self.kind)]) from error
        shared: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        for each in optimizers:
            shared.update(each.state)
            each.state = shared
        self.state = shared

    @property
    def kind(self) -> str:
        """What it is made of."""
        return " + ".join(type(each).__name__ for each in self.optimizers)

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Each one's step on its own parameters."""
        del closure
        for each in self.optimizers:
            each.step()


class OptimizersByName(SeveralOptimizers):
    """One for each of several models; each is stepped when the script says so."""

    def __init__(self, by_name: Mapping[str, torch.optim.Optimizer]) -> None:
        super().__init__(list(by_name.values()))
        self.by_name = dict(by_name)


def as_one(made: Any) -> torch.optim.Optimizer:
    """What a task's function has made; ConfigError when it is no optimizer."""
    several = list(made.values()) if isinstance(made, Mapping) else made
    several = several if isinstance(several, (list, tuple)) else [several]
    for each in several:
        if not isinstance(each, torch.optim.Optimizer):
            rule, remedy = "is no torch optimizer", "return one, or a list or dict of them"
            raise ConfigError([Problem("optimizer", rule, remedy, type(each).__name__)])
    if not several:
        raise ConfigError([Problem("optimizer", "is an empty list", "return one", has_value=False)])
    return several[0] if len(several) == 1 else SeveralOptimizers(several)


def members(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, ...]:
    """Those that step: it, or those it is made of."""
    return optimizer.optimizers if isinstance(optimizer, SeveralOptimizers) else (optimizer,)


def kind_of(optimizer: torch.optim.Optimizer) -> str:
    """Its name for people and contracts."""
    if isinstance(optimizer, SeveralOptimizers):
        return optimizer.kind
    return type(optimizer).__name__
