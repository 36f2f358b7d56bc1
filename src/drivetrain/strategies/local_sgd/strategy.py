"""local_sgd: every rank trains alone for some steps, then the ranks synchronize their weights.

The anchor is the weights at the last synchronization. The change of each rank's weights since then
is averaged in one all-reduce, weighted by the samples or tokens that the rank has counted in the
meantime. `average` applies the mean; DiLoCo takes a Nesterov step along it:

    change   = Σ share · (weights - anchor)
    momentum = μ · momentum + change
    weights  = anchor + rate · (change + μ · momentum)        (average: rate 1, μ 0)

Between two synchronizations the ranks' weights differ. Evaluations and checkpoints then use the
anchor.
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
    """Which steps exchange gradients, and after which the ranks synchronize. Steps count from 0."""

    inner_steps: int
    warmup_steps: int
    total_steps: int | None
    """None for a stream of unknown length: its last round may remain incomplete."""

    def is_warmup(self, step: int) -> bool:
        """Whether gradients are exchanged, as with ddp."""
        return step < self.warmup_steps

    def ends_after(self, step: int) -> bool:
        """Whether the ranks synchronize after this step, as they do after the run's last."""
        alone = step + 1 - self.warmup_steps
        return alone > 0 and (alone % self.inner_steps == 0 or step + 1 == self.total_steps)


def make(config: RunConfig, micro_batch_blocks: list[range]) -> Strategy:
    return LocalSGDStrategy(config.parallel.details(LocalSGD))


class LocalSGDStrategy(Strategy):
    """A full copy per rank, plus the state needed to synchronize the copies."""

    def __init__(self, config: LocalSGD) -> None:
        self._config = config

    def problems(self, profile: Profile, layout: Layout, cluster: Cluster) -> list[Problem]:
        """Check that a full copy fits on a device."""
        remedy = "use parallel.strategy=fsdp, which shards them"
        return memory_problems(self.cost(profile, layout, cluster), cluster, remedy)

    def cost(self, profile: Profile, layout: Layout, cluster: Cluster) -> Cost:
        """Return the cost of a full copy with anchor and momentum, sent every `inner_steps`."""
        use = Use(layout, self._config, profile.micro_batches_per_step)
        return cost_now(COST, profile, use)

    def apply(self, model: nn.Module, world: World) -> ParallelModel:
        """Move the model to the device and broadcast rank 0's weights."""
        model.to(world.device)
        world.share_weights(model)
        return LocalModel(model, self._config, world)


class LocalModel(SingleModel):
    """A model that only this rank updates until the round ends."""

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
        """The weights at the last synchronization, as one flat tensor."""
        self._momentum: torch.Tensor | None = None
        self._counted = torch.zeros(1, dtype=torch.float64, device=world.device)
        """Samples or tokens of this rank since then. It stays on the device: no step waits for it.
        """
        self._is_mid_round = False
        self._aside: torch.Tensor | None = None
        """This rank's own weights, while the model holds the anchor."""

    def is_alone(self, step: int) -> bool:
        """Whether the warm-up has ended."""
        return not self._rounds.is_warmup(step)

    def agrees_after(self, step: int) -> bool:
        """Whether a round ends with this step."""
        return self._rounds.ends_after(step)

    def ends_at(self, total_steps: int | None) -> None:
        """Set the run's number of steps: a round ends with the last one."""
        self._rounds = replace(self._rounds, total_steps=total_steps)

    def sum_gradients(self) -> None:
        """Sum gradients over ranks in one piece, for the warm-up steps."""
        for parameter in self._trained:
            if parameter.grad is None:  # no samples here in this step
                parameter.grad = torch.zeros_like(parameter)
        gradients = [p.grad for p in self._trained if p.grad is not None]
        total = self._world.sum(_flat(gradients))
        _copy(total, gradients)

    def about_to_move(self, count: torch.Tensor) -> None:
        """Prepare a local step on `count` samples or tokens."""
        if self._anchor is None:
            self._anchor = _flat(self._trained)
        self._is_mid_round = True
        self._counted += count

    def agree(self) -> None:
        """End the round: set the same weights on every rank. A collective call."""
        if self._anchor is None:
            return
        everybody = self._world.sum(self._counted.clone())
        # if nothing was counted on any rank, no weights have changed
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
        """Inside, the model holds the anchor. This needs no communication."""
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
        """Return the state that differs between ranks, which includes the optimizer's."""
        return {"local_sgd": self, "inner_optimizer": optimizer}

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's own state; the anchor is in the checkpoint as the model."""
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
        """Load the state after the model's weights, which are the anchor."""
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
    """Return a copy as one flat tensor."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def _copy(flat: torch.Tensor, into: list[nn.Parameter] | list[torch.Tensor]) -> None:
    """Copy a flat tensor back into its parts."""
    at = 0
    with torch.no_grad():
        for tensor in into:
            tensor.copy_(flat[at : at + tensor.numel()].view_as(tensor))
            at += tensor.numel()
