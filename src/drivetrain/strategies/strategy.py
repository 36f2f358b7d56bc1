"""Strategy: one way to spread a model. Its prediction stands beside its act.

To add one: docs/extending.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from drivetrain.cluster.description import Cluster
from drivetrain.config.schema import RunConfig
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.core.plugins import load
from drivetrain.core.text import readable_bytes
from drivetrain.parallel.expert.finding import find_experts
from drivetrain.parallel.layout import Layout
from drivetrain.parallel.model import ParallelModel
from drivetrain.parallel.world import World
from drivetrain.strategies.cost import CostModel, Memory, PartNumbers, Use


@dataclass(frozen=True)
class Profile:
    """What a strategy must know of a model to judge it, without a device."""

    num_parameters: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    """Two numbers per trained weight, as Adam keeps them; other optimizers keep fewer."""
    dtypes: frozenset[str] = frozenset({"float32"})
    """Of the weights that are trained."""
    micro_batches_per_step: int = 1
    """Per rank."""
    expert_bytes: int = 0
    """Of the weights: those of experts, which ep spreads."""
    expert_gradient_bytes: int = 0

    @classmethod
    def of(cls, model: nn.Module, micro_batches_per_step: int = 1) -> Profile:
        """Count a model, on whatever device it is. Frozen weights have no gradients."""
        parameters = list(model.parameters())
        trained = [p for p in parameters if p.requires_grad]
        trained_bytes = sum(p.numel() * p.element_size() for p in trained)
        experts = [p for each in find_experts(model) for p in each.module.parameters()]
        return cls(
            num_parameters=sum(p.numel() for p in parameters),
            parameter_bytes=sum(p.numel() * p.element_size() for p in parameters),
            gradient_bytes=trained_bytes,
            optimizer_bytes=2 * trained_bytes,
            dtypes=frozenset(str(p.dtype).removeprefix("torch.") for p in trained),
            micro_batches_per_step=micro_batches_per_step,
            expert_bytes=sum(p.nbytes for p in experts),
            expert_gradient_bytes=sum(p.nbytes for p in experts if p.requires_grad),
        )


@dataclass(frozen=True)
class Cost:
    """Per rank: bytes that stay for the whole run, and bytes sent in one step."""

    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    sent_bytes_per_step: int

    @property
    def state_bytes(self) -> int:
        """Memory that is taken whatever the batch; activations come on top."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes


ONE_MODEL = Problem(
    "parallel.strategy",
    "this way of spreading knows one model with one backward, and there are several",
    "use ddp or fsdp, without reproducibility=bitwise",
    has_value=False,
)


class Strategy(Protocol):
    """How a model is spread, what that costs, and what stands in the way."""

    def problems(self, profile: Profile, layout: Layout, cluster: Cluster) -> list[Problem]:
        """Why this cannot be done; empty when it can."""
        ...

    def cost(self, profile: Profile, layout: Layout, cluster: Cluster) -> Cost:
        """What it takes per rank; by the model of it that the planner has (`cost_now`)."""
        ...

    def notes(self, model: nn.Module, world: World) -> list[str]:
        """What the user should read of this model under this strategy."""
        return []

    def shards_on(self, world: World) -> torch.device | None:
        """Where `apply` leaves shards of a model that is on the meta device, to be filled then.

        None: it needs a model with its weights.
        """
        return None

    def apply(self, model: nn.Module, world: World) -> ParallelModel:
        """Do it. Moving the model, or what this rank keeps of it, to the device is part of it."""
        ...

    def apply_beside_others(self, model: nn.Module, world: World) -> ParallelModel:
        """The same for one of several models, whose backward reaches its own weights only."""
        raise ConfigError([ONE_MODEL])


def cost_now(model: CostModel, profile: Profile, use: Use) -> Cost:
    """By a strategy's cost model, of a model that is there: one part, activations left out."""
    part = PartNumbers(
        profile.parameter_bytes,
        profile.gradient_bytes,
        profile.optimizer_bytes,
        experts=profile.expert_bytes,
        trained_experts=profile.expert_gradient_bytes,
    )
    walk = model.walk([part], [False], 0.0, use)
    moments = [*walk.forward(), *walk.backward(), walk.optimizer(0.0)]
    held = walk.held()
    gradients = max(moment.gradients for moment in moments)
    memory = Memory(held.parameters, gradients, held.optimizer, 0.0, 0.0, 0.0, 0.0, "")
    memory = model.on_device(memory, use)
    sent = sum(each.sent_bytes(use.layout) for each in model.exchanges([part], [False], use))
    return Cost(int(memory.parameters), int(memory.gradients), int(memory.optimizer), int(sent))


def memory_problems(cost: Cost, cluster: Cluster, remedy: str) -> list[Problem]:
    """A problem when what must stay in memory does not fit, before anything is placed there."""
    memory = cluster.device_memory_bytes
    # the optimizer's share is left out: only Adam's is as large as assumed
    certain = cost.parameter_bytes + cost.gradient_bytes
    if memory is None or certain <= memory:
        return []
    return [
        Problem(
            "parallel.strategy",
            f"weights and gradients alone take {readable_bytes(certain)} per rank, and a device "
            f"has {readable_bytes(memory)}",
            remedy,
            has_value=False,
        )
    ]


# From a config to the strategy it asks for.


def strategy_from(config: RunConfig, micro_batch_blocks: list[range]) -> Strategy:
    """Imported now; `micro_batch_blocks` are each rank's micro-batch indices."""
    made: Strategy = load(config.parallel.traits.strategy)(config, micro_batch_blocks)
    return made
