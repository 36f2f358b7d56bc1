"""The learning rate: set by the config's curve, the user's scheduler or the user's own code.

A curve is a pure function of the step, the same after a resume and at any number of ranks. A torch
scheduler (`own_schedule.py`) has a state, which is saved with the run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch

from drivetrain.config.schema import Optimization
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.train.several.optimizers import kind_of, members

Occasion = Literal["step", "epoch", "evaluation"]
_DECAYED_PART = 0.1
"""Share of a run that wsd's decay takes if decay_steps is not set."""
_TIMESCALE = 10_000
"""Time scale of inverse_sqrt without a warm-up."""


@dataclass(frozen=True)
class RateCurve:
    """Warm-up, then one of the config's shapes; the same at any number of ranks."""

    shape: str
    warmup_steps: int
    total_steps: int | None
    min_ratio: float
    warmup_ratio: float = 0.0
    decay_steps: int | None = None

    @classmethod
    def of(cls, optimization: Optimization, total_steps: int | None) -> RateCurve:
        """Return the curve that a config describes."""
        return cls(
            optimization.lr_scheduler_type,
            optimization.warmup_steps,
            total_steps,
            optimization.min_lr_ratio,
            optimization.warmup_ratio,
            optimization.decay_steps,
        )

    @cached_property
    def warmup(self) -> int:
        """Number of warm-up steps, rounded up."""
        if self.warmup_ratio and self.total_steps is not None:
            return math.ceil(self.warmup_ratio * self.total_steps)
        return self.warmup_steps

    def is_left_alone(self, step: int) -> bool:
        """True if the curve does not set the rate from `step` on, even if it was changed."""
        return self.shape == "none" or (self.shape == "constant" and step >= self.warmup)

    def factor(self, step: int) -> float:
        """Return the factor of the peak learning rate at `step`, counted from 0."""
        warmup = self.warmup
        if step < warmup:
            return (step + 1) / warmup
        if self.shape == "inverse_sqrt":
            scale = warmup or _TIMESCALE
            return max(self.min_ratio, math.sqrt(scale / (scale + step + 1 - warmup)))
        if self.shape in ("constant", "none"):
            return 1.0
        progress = self._fallen(step, warmup)
        fall = 0.5 * (1 - math.cos(math.pi * progress)) if self.shape == "cosine" else progress
        return 1.0 - (1.0 - self.min_ratio) * fall

    def _fallen(self, step: int, warmup: int) -> float:
        """Return how much of the decay is done, from 0 to 1."""
        total = self.total_steps
        if self.shape == "wsd":
            if total is None:
                return 0.0
            span = self.decay_steps or math.ceil(_DECAYED_PART * total)
            # the last step is the lowest, as the first of the warm-up is above 0
            return min(1.0, max(0.0, (step + 1 - (total - span)) / span))
        if self.decay_steps is None and total is None:
            return 0.0
        span = self.decay_steps or max(1, (total or 0) - warmup)
        return min(1.0, (step - warmup) / span)


def batch_size_factor(optimization: Optimization, global_batch_size: int) -> float:
    """Return the factor by which learning_rate_scaling changes the rate for this batch size."""
    if optimization.learning_rate_scaling == "none" or optimization.base_batch_size is None:
        return 1.0
    ratio = global_batch_size / optimization.base_batch_size
    return ratio if optimization.learning_rate_scaling == "linear" else math.sqrt(ratio)


class LearningRate:
    """The rate with `lr_scheduler_type: none`: set by the user and never changed here."""

    is_the_scripts: bool = True
    """Whether the user's code sets the rate, so that it may differ between ranks."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def members(self) -> Sequence[LearningRate]:
        """The rates of several optimizers; just itself for one."""
        return (self,)

    def before_step(self, step: int) -> None:
        """Set the rates of `step`, counted from 0."""

    def after(self, occasion: Occasion, metrics: Mapping[str, float] | None = None) -> None:
        """Called after a step, an epoch or an evaluation (with its metrics)."""

    def ends_at(self, total_steps: int | None) -> None:
        """Set the run's last step, when it changes."""

    def begin_anew(
        self, num_done: Mapping[Occasion, int], found: list[Mapping[str, float]]
    ) -> None:
        """Take the run's position with the current settings, not with those of a checkpoint."""

    @property
    def terms(self) -> dict[str, Any]:
        """Terms for the run's contract, besides the config's keys."""
        return {"scheduler.class": "built-in"}

    def state_dict(self) -> dict[str, Any]:
        """Return the state to restore after a resume; the same on every rank."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""

    @property
    def current(self) -> float:
        """Rate of the first parameter group."""
        return float(self.optimizer.param_groups[0]["lr"])


class CurveRate(LearningRate):
    """Sets each parameter group's rate to its own peak × the curve's factor."""

    is_the_scripts = False

    def __init__(
        self, optimizer: torch.optim.Optimizer, curve: RateCurve, scale: float = 1.0
    ) -> None:
        super().__init__(optimizer)
        _refuse_torch_scheduler(optimizer)
        _refuse_rates_left_behind(optimizer)
        self._curve = curve
        if scale != 1.0:
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * scale
        self._peaks = [group["lr"] for group in optimizer.param_groups]
        self._factor = math.nan
        self._set: list[Any] | None = None
        """Rates as last set here; None before."""
        self._is_checked = False

    def ends_at(self, total_steps: int | None) -> None:
        """Set the step at which the curve ends."""
        self._curve = replace(self._curve, total_steps=total_steps)

    def before_step(self, step: int) -> None:
        """Set the rates of `step`, unless the curve is constant."""
        if not self._is_checked:  # a scheduler may have been built since
            self._is_checked = True
            _refuse_torch_scheduler(self.optimizer)
        if self._curve.is_left_alone(step):
            return
        factor = self._curve.factor(step)
        if factor != self._factor:
            self._refuse_another()
            self._factor = factor
            self._set = [peak * factor for peak in self._peaks]
            for group, rate in zip(self.optimizer.param_groups, self._set, strict=True):
                group["lr"] = rate

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Forget the rates set last: the groups have been restored with others."""
        del state
        self._factor, self._set = math.nan, None

    def _refuse_another(self) -> None:
        """ConfigError if the script has set a rate, which would be overwritten."""
        for group, rate in zip(self.optimizer.param_groups, self._set or (), strict=False):
            if group["lr"] is not rate and float(group["lr"]) != float(rate):
                rule = (
                    f"the script has set lr = {float(group['lr']):g} where the schedule had set "
                    f"{float(rate):g}, but only one of them can set it"
                )
                remedy = "use none to set it yourself"
                where = "optimization.lr_scheduler_type"
                raise ConfigError([Problem(where, rule, remedy, self._curve.shape)])


_REMEDY = (
    "pass it to the run, which steps and saves it: Task(schedule=lambda optimizer, total_steps: …) "
    "or prepare(…, scheduler=…); or set optimization.lr_scheduler_type=none, and step and save it "
    "yourself"
)


def refuse_unsaved_scheduler(rate: LearningRate) -> None:
    """ConfigError in a resumed run if a scheduler was not saved: it would start over."""
    for each in rate.members:
        if type(each) is LearningRate and is_scheduled(each.optimizer):
            rule = "a torch LR scheduler was built on it but not saved, and would start over"
            remedy = 'pass it on: prepare(…, scheduler=LRSchedule(scheduler, every="never"))'
            raise ConfigError([Problem("optimizer", rule, remedy, kind_of(each.optimizer))])


def is_scheduled(optimizer: torch.optim.Optimizer) -> bool:
    """True if a torch LR scheduler was built on it, which wraps the optimizer's step method."""
    return any(
        hasattr(each.step, "_wrapped_by_lr_sched") for each in (optimizer, *members(optimizer))
    )


def _refuse_torch_scheduler(optimizer: torch.optim.Optimizer) -> None:
    """ConfigError if a scheduler was built on it, whose first rate would be used as the peak."""
    if is_scheduled(optimizer):
        rule = "a torch LR scheduler was built on it, but the run would not step or save it"
        raise ConfigError([Problem("optimizer", rule, _REMEDY, kind_of(optimizer))])


def _refuse_rates_left_behind(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        peak = group.get("initial_lr", group["lr"])
        if peak != group["lr"]:
            rule = (
                f"lr = {float(group['lr']):g} was left by a torch LR scheduler "
                f"(initial_lr = {float(peak):g}) and would be used as the peak"
            )
            remedy = "set each group's lr to the peak, and initial_lr to the same"
            raise ConfigError([Problem("optimizer", rule, remedy, kind_of(optimizer))])
