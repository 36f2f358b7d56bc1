"""Meter: each step's loss over all ranks, gathered off the step's path.

A step only keeps references to its losses. Every `logging_steps` the open steps are summed over the
ranks in one small all-reduce, so the cost per step does not grow with what is measured.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from drivetrain.core.errors import ConfigError, Problem
from drivetrain.data.batches import MicroBatch
from drivetrain.parallel.world import World
from drivetrain.train.history import StepMetrics
from drivetrain.train.task import Loss, Total


@dataclass(slots=True)
class _Step:
    """This rank's part of one step."""

    losses: list[torch.Tensor] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    """What each loss is multiplied by to become a sum: samples for a mean, 1 for a Total."""
    counts: list[torch.Tensor | int] = field(default_factory=list)
    """Given by Totals only."""
    batch_samples: int = 0
    number: int = 0
    learning_rate: float = 0.0
    grad_norm: torch.Tensor | None = None
    global_count: torch.Tensor | None = None
    found_inf: torch.Tensor | None = None
    """Not 0 when fp16's scaler has skipped it; None without one."""


class Meter:
    """Collects losses, and turns them into StepMetrics when asked."""

    def __init__(self, world: World, *, counts: bool = True) -> None:
        self._world = world
        self._counts = counts
        self._open = _Step()
        self._closed: list[_Step] = []
        self._counts_tokens: bool | None = None

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """The gradient norm of the step under way."""
        return self._open.grad_norm

    @grad_norm.setter
    def grad_norm(self, norm: torch.Tensor) -> None:
        self._open.grad_norm = norm

    def note_scaler(self, found_inf: torch.Tensor) -> None:
        """What fp16's scaler has found in the gradients of the step under way."""
        self._open.found_inf = found_inf

    @property
    def num_losses(self) -> int:
        """Of the step under way, so far."""
        return len(self._open.losses)

    def add(self, loss: Loss, micro: MicroBatch) -> None:
        """One micro-batch's loss."""
        here = self._open
        counted_before = bool(here.counts) if here.losses else self._counts_tokens
        if counted_before is not None and counted_before != isinstance(loss, Total):
            rule = "is a mean for some batches and a Total for others"
            remedy = "return the same kind for every batch"
            raise ConfigError([Problem("loss", rule, remedy, has_value=False)])
        if isinstance(loss, Total):
            here.losses.append(loss.sum.detach())
            here.weights.append(1.0)
            here.counts.append(loss.count)
        else:
            here.losses.append(loss.detach())
            here.weights.append(float(micro.num_samples))

    def note_batch(self, micro: MicroBatch) -> None:
        """A step in which this rank has no samples still has a size."""
        self._open.batch_samples = micro.batch_samples

    def count_correction(self) -> torch.Tensor | None:
        """Samples / count over all ranks; None when the count is the samples, and nothing is sent.

        Whether the task counts for itself is seen at its first loss. A rank without samples in the
        very first step would not know, so there the ranks ask each other.
        """
        here = self._open
        if self._counts_tokens is None:
            mark = torch.tensor([float(bool(here.counts))], device=self._world.device)
            self._counts_tokens = bool(self._world.sum(mark).item())
        if not self._counts_tokens:
            return None
        count = torch.zeros(1, dtype=torch.float64, device=self._world.device)
        for part in here.counts:
            count += part
        if not self._counts:
            count.zero_()
        here.global_count = self._world.sum(count)
        # nothing counted anywhere: gradients are zero, and stay so
        count = torch.where(here.global_count == 0, 1.0, here.global_count)
        return (here.batch_samples / count).float().squeeze()

    def end_step(self, number: int, learning_rate: float) -> None:
        """Close the step under way; `number` counts from 1."""
        here = self._open
        here.number = number
        here.learning_rate = learning_rate
        self._closed.append(here)
        self._open = _Step()

    def collect(self) -> list[StepMetrics]:
        """Every closed step since the last call, over all ranks. A collective call."""
        steps, self._closed = self._closed, []
        if not steps:
            return []
        values = iter(_to_floats([loss for step in steps for loss in step.losses]))
        own = [sum(next(values) * weight for weight in step.weights) for step in steps]
        if not self._counts:  # another rank has the same samples
            own = [0.0] * len(own)
        totals = self._world.sum_floats(own)
        norms = iter(_to_floats([s.grad_norm for s in steps if s.grad_norm is not None]))
        found = iter(_to_floats([s.found_inf for s in steps if s.found_inf is not None]))
        return [
            _metrics(
                step,
                total,
                None if step.grad_norm is None else next(norms),
                is_skipped=step.found_inf is not None and next(found) > 0,
            )
            for step, total in zip(steps, totals, strict=True)
        ]


def _to_floats(tensors: list[torch.Tensor]) -> list[float]:
    """All of them in one go: on a GPU that is one wait instead of many."""
    if not tensors:
        return []
    floats: list[float] = torch.stack(tensors).reshape(len(tensors)).tolist()
    return floats


def _metrics(
    step: _Step, total: float, grad_norm: float | None, *, is_skipped: bool
) -> StepMetrics:
    count = None if step.global_count is None else float(step.global_count)
    return StepMetrics(
        step=step.number,
        loss=total / (step.batch_samples if count is None else count or 1.0),
        learning_rate=step.learning_rate,
        grad_norm=grad_norm,
        num_samples=step.batch_samples,
        num_tokens=count,
        is_skipped=is_skipped,
    )
