"""Learning rate as a pure function of the step."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from drivetrain.config.schema import Optimization
from drivetrain.core.errors import ConfigError, Problem


@dataclass(frozen=True)
class Schedule:
    """Warm-up, then constant, linear or cosine. The same at any number of ranks."""

    shape: str
    warmup_steps: int
    total_steps: int | None
    min_ratio: float

    @classmethod
    def of(cls, optimization: Optimization, total_steps: int | None) -> Schedule:
        """The schedule a config describes."""
        return cls(
            optimization.lr_scheduler_type,
            optimization.warmup_steps,
            total_steps,
            optimization.min_lr_ratio,
        )

    def factor(self, step: int) -> float:
        """What the peak learning rate is multiplied by at `step`, counted from 0."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.shape == "constant" or self.total_steps is None:
            return 1.0
        span = max(1, self.total_steps - self.warmup_steps)
        progress = min(1.0, (step - self.warmup_steps) / span)
        fall = progress if self.shape == "linear" else 0.5 * (1 - math.cos(math.pi * progress))
        return 1.0 - (1.0 - self.min_ratio) * fall


def batch_size_factor(optimization: Optimization, global_batch_size: int) -> float:
    """How much the learning rate grows for a batch larger than the one it was tuned for."""
    if optimization.learning_rate_scaling == "none" or optimization.base_batch_size is None:
        return 1.0
    ratio = global_batch_size / optimization.base_batch_size
    return ratio if optimization.learning_rate_scaling == "linear" else math.sqrt(ratio)


_REMEDY = (
    "leave torch's out and use optimization.lr_scheduler_type, warmup_steps and min_lr_ratio, "
    "which are the same after a resume and at any number of ranks"
)


def _refuse_torch_scheduler(optimizer: torch.optim.Optimizer) -> None:
    """It has set its first rate already, which would be taken for the peak of ours."""
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):  # what LRScheduler does to the method
        rule = "a torch LR scheduler was built on it, and two schedules would set one rate"
        raise ConfigError([Problem("optimizer", rule, _REMEDY, type(optimizer).__name__)])


def _refuse_rates_left_behind(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        peak = group.get("initial_lr", group["lr"])
        if peak != group["lr"]:
            rule = (
                f"lr = {float(group['lr']):g} was left behind by a torch LR scheduler "
                f"(initial_lr = {float(peak):g}) and would be taken for the peak"
            )
            remedy = "set each group's lr to the peak, and initial_lr to the same"
            raise ConfigError([Problem("optimizer", rule, remedy, type(optimizer).__name__)])


class LearningRate:
    """Sets each parameter group's rate: its own peak × the schedule's factor."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, schedule: Schedule, scale: float = 1.0
    ) -> None:
        _refuse_torch_scheduler(optimizer)
        _refuse_rates_left_behind(optimizer)
        self._schedule = schedule
        self._optimizer = optimizer
        self._peaks = [group["lr"] * scale for group in optimizer.param_groups]
        self._factor = math.nan

    def ends_at(self, total_steps: int | None) -> None:
        """The run's last step, where it has turned out to be another one."""
        self._schedule = replace(self._schedule, total_steps=total_steps)

    def set(self, step: int) -> None:
        """Set the rates for `step`."""
        factor = self._schedule.factor(step)
        if factor != self._factor:
            _refuse_torch_scheduler(self._optimizer)
            self._factor = factor
            for group, peak in zip(self._optimizer.param_groups, self._peaks, strict=True):
                group["lr"] = peak * factor

    @property
    def current(self) -> float:
        """The first group's rate."""
        return float(self._optimizer.param_groups[0]["lr"])
