"""An optimizer that the user built before the model is distributed."""

from __future__ import annotations

import torch
from torch import nn

from drivetrain.core.errors import ConfigError, Problem


class GivenOptimizer:
    """Returns the optimizer with the parameters of the distributed model.

    Sharding replaces a model's parameters by others with the same names. The optimizer's groups are
    updated by name, before it has any state.
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
                        "build it from model.parameters()",
                        type(optimizer).__name__,
                    )
                ]
            )

    def __call__(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer, with its groups updated to the parameters of `model`."""
        now = dict(model.named_parameters())
        for group in self._optimizer.param_groups:
            names = [self._names[id(p)] for p in group["params"]]
            # a pipeline stage has only its own parameters
            group["params"] = [now[name] for name in names if name in now]
        return self._optimizer
