"""local_sgd: every rank trains alone for some steps, then the ranks agree on the weights.

What each rank's weights have changed by since the last agreement (the anchor) is averaged in one
all-reduce, each rank weighted by the samples or tokens it has counted meanwhile. `average` takes
the mean; DiLoCo takes a Nesterov step along it:

    change   = Σ share · (weights - anchor)
    momentum = μ · momentum + change
    weights  = anchor + rate · (change + μ · momentum)        (average: rate 1, μ 0)

Between two agreements the ranks' weights differ. Whoever asks for the model then (an evaluation, a
checkpoint) is shown the anchor.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from drivetrain.cluster.description import Cluster
from drivetrain.config.schema import RunConfig
from drivetrain.core.errors import Problem
from drivetrain.core.stateful import Stateful
from drivetrain.parallel.layout import Layout
from drivetrain.parallel.model import LocalSteps, ParallelModel
from drivetrain.parallel.world import World
from drivetrain.strategies.cost import Use
from drivetrain.strategies.local_sgd import LocalSGD
from drivetrain.strategies.local_sgd.cost import COST
from drivetrain.strategies.single import SingleModel
from drivetrain.strategies.strategy import Cost, Profile, Strategy, cost_now, memory_problems

WIRE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Rounds:
    """Which steps are taken together, and after which the ranks agree. Steps count from 0."""

    inner_steps: int
    warmup_steps: int
    total_steps: int | None
    """None for a stream whose end is not known: its last round may stay open."""

    def is_warmup(self, step: int) -> bool:
        """Whether gradients are exchanged, as ddp does."""
        return step < self.warmup_steps

    def ends_after(self, step: int) -> bool:
        """Whether the ranks agree on the weights after this step; the run's last is one."""
        alone = step + 1 - self.warmup_steps
        return alone > 0 and (alone % self.inner_steps == 0 or step + 1 == self.total_steps)


def make(config: RunConfig, micro_batch_blocks: list[range]) -> Strategy:
    return LocalSGDStrategy(config.parallel.details(LocalSGD))


class LocalSGDStrategy(Strategy):
    """A full copy per rank, and what agreeing needs beside it."""

    def __init__(self, config: LocalSGD) -> None:
        self._config = config

    def problems(self, profile: Profile, layout: Layout, cluster: Cluster) -> list[Problem]:
        """A full copy must fit on a device."""
        remedy = "use parallel.strategy=fsdp, which shards all three"
        return memory_problems(self.cost(profile, layout, cluster), cluster, remedy)

    def cost(self, profile: Profile, layout: Layout, cluster: Cluster) -> Cost:
        """A full copy with the anchor and its momentum; sent once in `inner_steps` steps."""
        use = Use(layout, self._config, profile.micro_batches_per_step)
        return cost_now(COST, profile, use)

    def apply(self, model: nn.Module, world: World) -> ParallelModel:
        """All ranks start from rank 0's weights."""
        model.to(world.device)
        world.share_weights(model)
        return LocalModel(model, self._config, world)


class LocalModel(SingleModel):
    """A model that is this rank's alone until the round ends."""

    can_replay = False

    def __init__(self, model: nn.Module, config: LocalSGD, world: World) -> None:
        super().__init__(model)
        self._world = world
        self._rounds = Rounds(config.inner_steps, config.warmup_steps, None)
        self.local_steps: LocalSteps | None = self
        is_average = config.outer == "average"
        self._rate = 1.0 if is_average else config.outer_learning_rate
        self._momentum_factor = 0.0 if is_average else config.outer_momentum
        self._wire_dtype = WIRE_DTYPES[config.outer_dtype]
        self._trained = [p for p in model.parameters() if p.requires_grad]
        self._anchor: torch.Tensor | None = None
        """The weights last agreed on, in one piece."""
        self._momentum: torch.Tensor | None = None
        self._counted = torch.zeros(1, dtype=torch.float64, device=world.device)
        """Samples or tokens of this rank since then. Read where it lies: no step waits for it."""
        self._is_mid_round = False
        self._aside: torch.Tensor | None = None
        """This rank's own weights, while the model shows the anchor."""

    def is_alone(self, step: int) -> bool:
        """From the warm-up's end on."""
        return not self._rounds.is_warmup(step)

    def agrees_after(self, step: int) -> bool:
        """Where a round ends."""
        return self._rounds.ends_after(step)

    def ends_at(self, total_steps: int | None) -> None:
        """Where the last round ends, too."""
        self._rounds = replace(self._rounds, total_steps=total_steps)

    def sum_gradients(self) -> None:
        """What ddp does, in one piece: for the steps of the warm-up."""
        for parameter in self._trained:
            if parameter.grad is None:  # no samples here in this step
                parameter.grad = torch.zeros_like(parameter)
        gradients = [p.grad for p in self._trained if p.grad is not None]
        total = self._world.sum(_flat(gradients))
        _copy(total, gradients)

    def about_to_move(self, count: torch.Tensor) -> None:
        """Before a step of its own, on so many samples or tokens."""
        if self._anchor is None:
            self._anchor = _flat(self._trained)
        self._is_mid_round = True
        self._counted += count

    def agree(self) -> None:
        """The round's end: the same weights on every rank. A collective call."""
        if self._anchor is None:
            return
        everybody = self._world.sum(self._counted.clone())
        # nothing counted anywhere: nothing has moved
        share = (self._counted / torch.where(everybody == 0, 1.0, everybody)).float().squeeze()
        change = _flat(self._trained).sub_(self._anchor).mul_(share)
        change = self._world.sum(change.to(self._wire_dtype)).to(self._anchor.dtype)
        if self._momentum_factor:
            if self._momentum is None:
                self._momentum = torch.zeros_like(change)
            self._momentum.mul_(self._momentum_factor).add_(change)
            change.add_(self._momentum, alpha=self._momentum_factor)
        self._anchor.add_(change, alpha=self._rate)
        _copy(self._anchor, self._trained)
        self._counted.zero_()
        self._is_mid_round = False

    @contextmanager
    def shown_weights(self) -> Iterator[bool]:
        """Within, the model is the one last agreed on; it costs no message."""
        if not self._is_mid_round or self._anchor is None:
            yield True
            return
        self._aside = _flat(self._trained)
        _copy(self._anchor, self._trained)
        try:
            yield True
        finally:
            _copy(self._aside, self._trained)
            self._aside = None

    def private_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Stateful]:
        """A rank that trains alone has an optimizer of its own."""
        return {"local_sgd": self, "inner_optimizer": optimizer}

    def state_dict(self) -> dict[str, Any]:
        """What this rank alone has; the anchor is in the checkpoint, as the model."""
        weights = None
        if self._is_mid_round:
            weights = _flat(self._trained) if self._aside is None else self._aside
        return {
            "weights": weights,
            "momentum": self._momentum,
            "counted": self._counted.item(),
            "buffers": dict(self.inner.named_buffers()),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """After the model's weights, which are the anchor, have been loaded."""
        self._anchor = None
        self._is_mid_round = state["weights"] is not None
        device = self._world.device
        if self._is_mid_round:
            self._anchor = _flat(self._trained)
            _copy(state["weights"].to(device), self._trained)
        self._momentum = None if state["momentum"] is None else state["momentum"].to(device)
        self._counted.fill_(state["counted"])
        buffers = dict(self.inner.named_buffers())
        for name, value in state["buffers"].items():
            buffers[name].copy_(value)


def _flat(tensors: list[nn.Parameter] | list[torch.Tensor]) -> torch.Tensor:
    """A copy in one piece."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def _copy(flat: torch.Tensor, into: list[nn.Parameter] | list[torch.Tensor]) -> None:
    """Back from one piece."""
    at = 0
    with torch.no_grad():
        for tensor in into:
            tensor.copy_(flat[at : at + tensor.numel()].view_as(tensor))
            at += tensor.numel()
