"""Count the tokens of each expert, and pass the counts to routers that balance themselves."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from drivetrain.parallel.expert.finding import Experts
from drivetrain.parallel.world import World


class LayerLoad(NamedTuple):
    """Tokens sent to each expert of one layer, over all ranks."""

    layer: str
    tokens: list[int]


Balance = Callable[[torch.Tensor], None]
"""A router's method that takes the number of tokens each expert got in a step."""


def balancer(model: nn.Module, experts: Experts) -> Balance | None:
    """Return `balance(load)` of the module that contains a layer's experts, if it has one."""
    holder = model.get_submodule(experts.name.rpartition(".")[0])
    found = getattr(holder, "balance", None)
    return found if callable(found) else None


class ExpertLoad:
    """Counts tokens where experts are called in training, each token once in every layout.

    Create it from the whole model, before it is split, so that each rank knows all layers.
    """

    def __init__(self, model: nn.Module, experts: Sequence[Experts], world: World) -> None:
        self._layers = [(each.name, each.count) for each in experts]
        self._world = world
        self._modules = [each.module for each in experts]
        self._balancers = [balancer(model, each) for each in experts]
        self.is_balanced = any(each is not None for each in self._balancers)
        """Whether a router of the model, on any rank, balances by the load."""
        shape = (len(experts), max(each.count for each in experts))
        self._step = torch.zeros(shape, dtype=torch.int64, device=world.device)
        self._since = torch.zeros_like(self._step)
        self.num_chosen = 1
        """Experts per token in the last call."""
        self.counts = True
        """Whether this rank has samples in this micro-batch, or only keeps in step."""
        for row, each in enumerate(experts):
            count = partial(self._count, row, inspect.signature(each.module.forward))
            each.module.register_forward_pre_hook(count, with_kwargs=True)

    def leave_to_others(self, model: nn.Module) -> None:
        """Leave layers that are on other pipeline stages to be balanced there."""
        here = set(model.modules())
        self._balancers = [
            balance if module in here else None
            for module, balance in zip(self._modules, self._balancers, strict=True)
        ]

    def _count(
        self, row: int, signature: inspect.Signature, module: nn.Module, args: Any, kwargs: Any
    ) -> None:
        is_again = torch._C._current_graph_task_id() != -1  # noqa: SLF001 - in backward: recomputed
        if not (module.training and self.counts and self._world.speaks_for_samples) or is_again:
            return
        chosen = signature.bind(*args, **kwargs).args[1].detach()
        self.num_chosen, chosen = chosen.shape[-1], chosen.flatten()
        self._step[row].scatter_add_(0, chosen, torch.ones_like(chosen))

    @torch.no_grad()
    def end_step(self) -> None:
        """Pass the whole batch's counts to the routers. A collective call if there are some."""
        if self.is_balanced:
            whole = self._world.sum(self._step.clone())
            for load, (_, count), balance in zip(whole, self._layers, self._balancers, strict=True):
                if balance is not None:
                    balance(load[:count])
        self._since += self._step
        self._step.zero_()

    def take(self) -> list[LayerLoad]:
        """Return the counts since the last call, over all ranks. A collective call."""
        own = self._since.flatten().tolist()
        self._since.zero_()
        total = torch.tensor(self._world.sum_floats([float(n) for n in own]), dtype=torch.int64)
        rows = total.view(self._since.shape).tolist()
        return [
            LayerLoad(name, row[:count])
            for (name, count), row in zip(self._layers, rows, strict=True)
        ]
