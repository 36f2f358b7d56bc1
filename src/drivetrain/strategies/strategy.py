"""Strategy: one way to distribute a model over ranks, with a prediction of its cost.

docs/extending.md explains how to add one.
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
    """What a strategy needs to know about a model to predict its cost, without a device."""

    num_parameters: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    """Two numbers per trained weight, as Adam keeps them; other optimizers keep fewer."""
    dtypes: frozenset[str] = frozenset({"float32"})
    """Of the trained weights."""
    micro_batches_per_step: int = 1
    """Per rank."""
    expert_bytes: int = 0
    """Bytes of the experts' weights, which ep shards."""
    expert_gradient_bytes: int = 0

    @classmethod
    def of(cls, model: nn.Module, micro_batches_per_step: int = 1) -> Profile:
        """Measure a model on any device, including meta. Frozen weights have no gradients."""
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
    """Per rank: bytes held for the whole run, and bytes sent per step."""

    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    sent_bytes_per_step: int

    @property
    def state_bytes(self) -> int:
        """Bytes that do not depend on the batch size; activations are not included."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes


ONE_MODEL = Problem(
    "parallel.strategy",
    "this strategy supports one model with one backward, and there are several",
    "use ddp or fsdp, without reproducibility=bitwise",
    has_value=False,
)


class Strategy(Protocol):
    """How a model is distributed, what that costs, and what prevents it."""

    def problems(self, profile: Profile, layout: Layout, cluster: Cluster) -> list[Problem]:
        """Return why this strategy cannot be used; empty if it can."""
        ...

    def cost(self, profile: Profile, layout: Layout, cluster: Cluster) -> Cost:
        """Return the cost per rank, from the cost model that the planner uses (`cost_now`)."""
        ...

    def notes(self, model: nn.Module, world: World) -> list[str]:
        """Return what the user should know about this model under this strategy."""
        return []

    def shards_on(self, world: World) -> torch.device | None:
        """Return the device on which `apply` leaves empty shards of a model on the meta device.

        None if `apply` needs a model with its weights.
        """
        return None

    def apply(self, model: nn.Module, world: World) -> ParallelModel:
        """Distribute the model. This moves it, or this rank's part of it, to the device."""
        ...

    def apply_beside_others(self, model: nn.Module, world: World) -> ParallelModel:
        """Like `apply`, for one of several models: its backward reaches its own weights only."""
        raise ConfigError([ONE_MODEL])


def cost_now(model: CostModel, profile: Profile, use: Use) -> Cost:
    """Return the cost of an actual model as one part, without activations."""
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
    """Return a problem if weights and gradients cannot fit, before anything is allocated."""
    memory = cluster.device_memory_bytes
    # without the optimizer state: only Adam's is as large as assumed
    certain = cost.parameter_bytes + cost.gradient_bytes
    if memory is None or certain <= memory:
        return []
    return [
        Problem(
            "parallel.strategy",
            f"weights and gradients alone need {readable_bytes(certain)} per rank, and a device "
            f"has {readable_bytes(memory)}",
            remedy,
            has_value=False,
        )
    ]


def strategy_from(config: RunConfig, micro_batch_blocks: list[range]) -> Strategy:
    """Import and create the config's strategy; `micro_batch_blocks` has each rank's indices."""
    made: Strategy = load(config.parallel.traits.strategy)(config, micro_batch_blocks)
    return made
