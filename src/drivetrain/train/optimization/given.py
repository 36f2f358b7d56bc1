"""An optimizer the user has already made, for a model that is about to be spread."""

from __future__ import annotations

import torch
from torch import nn

from drivetrain.core.errors import ConfigError, Problem


class GivenOptimizer:
    """Hands the optimizer on, pointed at the parameters the spread model has now.

    Sharding replaces a model's parameters by others of the same names; the optimizer's groups are
    re-pointed by those names, before it has any state.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        self._optimizer = optimizer
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        strangers = [
            parameter
            for group in optimizer.param_groups
            for parameter in group["params"]
            if id(parameter) not in self._names
        ]
        if strangers:
            raise ConfigError(
                [
                    Problem(
                        "optimizer",
                        f"holds {len(strangers)} parameters that are not the model's",
                        "make it from model.parameters()",
                        type(optimizer).__name__,
                    )
                ]
            )

    def __call__(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer, re-pointed."""
        now = dict(model.named_parameters())
        for group in self._optimizer.param_groups:
            names = [self._names[id(p)] for p in group["params"]]
            group["params"] = [now[name] for name in names if name in now]  # a stage has its own
        return self._optimizer
