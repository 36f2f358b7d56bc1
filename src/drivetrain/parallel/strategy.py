"""Strategy: one way to spread a model. Its prediction stands beside its act.

To add one: a file with a class that has these three methods, and a line in `strategy_from`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from drivetrain.cluster.description import Cluster
from drivetrain.core.errors import Problem
from drivetrain.core.units import readable_bytes
from drivetrain.parallel.layout import Layout
from drivetrain.parallel.world import World


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

    @classmethod
    def of(cls, model: nn.Module, micro_batches_per_step: int = 1) -> Profile:
        """Count a model, on whatever device it is. Frozen weights have no gradients."""
        parameters = list(model.parameters())
        trained = [p for p in parameters if p.requires_grad]
        trained_bytes = sum(p.numel() * p.element_size() for p in trained)
        return cls(
            num_parameters=sum(p.numel() for p in parameters),
            parameter_bytes=sum(p.numel() * p.element_size() for p in parameters),
            gradient_bytes=trained_bytes,
            optimizer_bytes=2 * trained_bytes,
            dtypes=frozenset(str(p.dtype).removeprefix("torch.") for p in trained),
            micro_batches_per_step=micro_batches_per_step,
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


class OwnStep(Protocol):
    """An engine that keeps the gradients to itself: it corrects, clips and steps in one call."""

    def take_over(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer is made; from here on it is the engine that calls it."""
        ...

    def backward(self, loss: torch.Tensor) -> None:
        """Add one micro-batch's gradients."""
        ...

    def step(self, correction: torch.Tensor | None) -> torch.Tensor:
        """Multiply the gradients, clip, and move the weights. Returns the norm before clipping."""
        ...

    def model_state(self) -> dict[str, torch.Tensor]:
        """Weights and buffers by the user's names; this rank's part. A collective call."""
        ...

    def optimizer_state(self, *, make: bool = False) -> dict[str, Any]:
        """By `<parameter>.<key>`; this rank's part; `make` it if there is none. Collective."""
        ...

    def put_back(self, model: Mapping[str, torch.Tensor], optimizer: Mapping[str, Any]) -> None:
        """What those two gave, filled with other values. A collective call."""
        ...


class Spread(Protocol):
    """A model spread over the ranks: what the loop needs of it, whatever the strategy."""

    module: nn.Module
    """Called in training."""
    inner: nn.Module
    """The user's own module."""
    evaluated: Any
    """Called in evaluation: `inner`, unless its parts are on several ranks."""
    counts: bool
    """Whether this rank's losses are summed: one of the ranks that work on the same samples."""
    forwards_in_lockstep: bool
    """Whether a forward talks to other ranks, so that all must make the same number of them."""
    needs_every_turn: bool
    """Whether a rank must run a micro-batch even when it has no samples, because others wait."""
    loss_multiplier: float
    """Undoes the engine's own averaging: the loop speaks of sums over the global batch."""
    own_step: OwnStep | None
    """The engine that has the gradients; None when they lie open in `parameter.grad`."""

    def micro_batch(self, index: int, *, is_last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of one micro-batch; gradients travel only in the last."""
        ...

    def finish_gradients(self) -> None:
        """After the last micro-batch: gradients are complete on return."""
        ...

    def total_norm(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """The 2-norm over all ranks' gradients, as a plain tensor."""
        ...

    def local(self, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """The plain tensors this rank holds, for what is done to every element alike."""
        ...

    def full_state(self) -> dict[str, Any]:
        """The whole state dict under the user's own names, on rank 0's CPU. A collective call."""
        ...


class Strategy(Protocol):
    """How a model is spread, what that costs, and what stands in the way."""

    name: str

    def problems(self, profile: Profile, layout: Layout, cluster: Cluster) -> list[Problem]:
        """Why this cannot be done; empty when it can."""
        ...

    def cost(self, profile: Profile, layout: Layout, cluster: Cluster) -> Cost:
        """What it takes per rank."""
        ...

    def apply(self, model: nn.Module, world: World) -> Spread:
        """Do it. Moving the model, or what this rank keeps of it, to the device is part of it."""
        ...


def ring_bytes(num_bytes: int, num_ranks: int) -> int:
    """What a rank sends when so many bytes are summed in a ring: each part twice, its own once."""
    return 2 * num_bytes * (num_ranks - 1) // num_ranks


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
