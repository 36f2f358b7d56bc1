"""The user's own learning-rate schedule: any torch scheduler, stepped and saved with a run."""

from __future__ import annotations

import base64
import copy
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from drivetrain.checkpoint.state import pack, unpack
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.core.requirements import comes_from
from drivetrain.train.optimization.schedule import LearningRate, Occasion

Every = Literal["step", "epoch", "evaluation", "never"]


@dataclass(frozen=True)
class LRSchedule:
    """A torch LR scheduler and when to step it.

    Attributes:
        scheduler: A torch scheduler, or any object with `step`, `state_dict` and `load_state_dict`.
        every: Step it after each "step", "epoch" or "evaluation"; "never": your own code calls its
            `step()`. Default: "evaluation" for a ReduceLROnPlateau, "step" for all others.
        metric: The evaluation metric passed to a ReduceLROnPlateau.
    """

    scheduler: LRScheduler
    every: Every | None = None
    metric: str = "loss"

    @property
    def occasion(self) -> Every:
        """When the scheduler is stepped, with the default filled in."""
        if self.every is not None:
            return self.every
        return "evaluation" if isinstance(self.scheduler, ReduceLROnPlateau) else "step"


ScheduleFactory = Callable[[torch.optim.Optimizer, int | None], LRScheduler | LRSchedule | None]
"""`schedule(optimizer, total_steps)`; `total_steps` is None for a stream without max_steps.

If it returns None, the optimizer's learning rates are left unchanged."""


class GivenScheduler:
    """A scheduler that already exists, as the schedule of a task."""

    def __init__(self, given: LRScheduler | LRSchedule) -> None:
        self._given = given

    def __call__(
        self,
        optimizer: torch.optim.Optimizer,  # noqa: ARG002 - `own_rate` compares them
        total_steps: int | None,  # noqa: ARG002
    ) -> LRScheduler | LRSchedule:
        return self._given


class SchedulesByName(dict[str, "ScheduleFactory"]):
    """Schedules of several models' optimizers, by name; an optimizer without one keeps its rate."""

    def __call__(
        self, optimizer: torch.optim.Optimizer, total_steps: int | None
    ) -> LRScheduler | LRSchedule:
        """Never called: each optimizer has its own schedule."""
        raise AssertionError(f"each optimizer has its own ({optimizer}, {total_steps})")


def as_factory(scheduler: LRScheduler | LRSchedule | ScheduleFactory) -> ScheduleFactory:
    """Return a schedule for a task from what `prepare` was given."""
    if isinstance(scheduler, (LRScheduler, LRSchedule)) or not callable(scheduler):
        return GivenScheduler(scheduler)
    return scheduler


def own_rate(
    factory: ScheduleFactory, optimizer: torch.optim.Optimizer, total_steps: int | None
) -> LearningRate:
    """Build a task's schedule; ConfigError if it is not usable."""
    made = factory(optimizer, total_steps)
    if made is None:
        return LearningRate(optimizer)
    schedule = made if isinstance(made, LRSchedule) else LRSchedule(made)
    scheduler = schedule.scheduler
    kind = type(scheduler).__name__
    missing = [n for n in ("step", "state_dict", "load_state_dict") if not hasattr(scheduler, n)]
    if missing:
        remedy = "return a scheduler of torch.optim.lr_scheduler, or LRSchedule(scheduler, every=…)"
        raise _refusal(f"is not a scheduler: it has no {missing[0]}", remedy, kind)
    if comes_from("accelerate", scheduler):
        rule = "comes from accelerator.prepare, which steps it once per process"
        raise _refusal(rule, "pass torch's scheduler itself", kind)
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        remedy = "build it on the optimizer that the run uses"
        raise _refusal("was built on another optimizer", remedy, kind)
    if isinstance(scheduler, ReduceLROnPlateau) and schedule.occasion not in (
        "evaluation",
        "never",
    ):
        remedy = 'use every="evaluation", or "never" and step it yourself'
        raise _refusal(f"needs a metric, but a {schedule.occasion} has none", remedy, kind)
    return OwnRate(optimizer, schedule)


class OwnRate(LearningRate):
    """Steps the user's scheduler on the chosen occasion."""

    def __init__(self, optimizer: torch.optim.Optimizer, schedule: LRSchedule) -> None:
        super().__init__(optimizer)
        self._schedule = schedule
        self._scheduler: Any = schedule.scheduler
        self._fresh = copy.deepcopy(_plain_state(self._scheduler))
        self._count = self._counted()

    @property
    def occasion(self) -> Every:
        """When the scheduler is stepped."""
        return self._schedule.occasion

    @property
    def scheduler(self) -> Any:
        """The user's scheduler."""
        return self._scheduler

    @property
    def name(self) -> str:
        """Name of the scheduler's class."""
        return type(self._scheduler).__name__

    def after(self, occasion: Occasion, metrics: Mapping[str, float] | None = None) -> None:
        """Step the scheduler if this is its occasion."""
        if occasion != self.occasion:
            return
        if self._counted() != self._count:
            rule = "is stepped by both the script and the run"
            remedy = 'remove the call, or pass LRSchedule(scheduler, every="never")'
            raise _refusal(rule, remedy, self.name)
        self._step(metrics or {})

    def _step(self, metrics: Mapping[str, float]) -> None:
        if isinstance(self._scheduler, ReduceLROnPlateau):
            self._scheduler.step(_metric(self._schedule.metric, metrics))
        else:
            self._scheduler.step()
        self._count = self._counted()

    def begin_anew(
        self, num_done: Mapping[Occasion, int], found: list[Mapping[str, float]]
    ) -> None:
        """Reset the scheduler, then step it as often as it would have been stepped by now."""
        if self.occasion == "never":
            return
        self._scheduler.load_state_dict(copy.deepcopy(self._fresh))
        with warnings.catch_warnings():  # torch misses optimizer steps in between
            warnings.simplefilter("ignore", UserWarning)
            for metrics in found if self.occasion == "evaluation" else ():
                self._step(metrics)
            for _ in range(num_done.get(self.occasion, 0)):
                self._step({})

    @property
    def terms(self) -> dict[str, Any]:
        """The scheduler's class, its settings, and when it is stepped."""
        when: dict[str, Any] = {"scheduler.every": self.occasion}
        if isinstance(self._scheduler, ReduceLROnPlateau):
            when["scheduler.metric"] = self._schedule.metric
        return {
            "scheduler.class": self.name,
            **when,
            **dict(_settings(self._scheduler, "scheduler")),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the exact state as text, including numeric keys and infinities."""
        packed = pack({"scheduler": _plain_state(self._scheduler)})
        return {"packed": base64.b64encode(packed.numpy().tobytes()).decode()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        packed = bytearray(base64.b64decode(state["packed"]))
        self._scheduler.load_state_dict(
            unpack(torch.frombuffer(packed, dtype=torch.uint8))["scheduler"]
        )
        self._count = self._counted()

    def _counted(self) -> tuple[int, ...]:
        """How often the scheduler and its parts were stepped, where they record it."""
        return tuple(getattr(each, "last_epoch", 0) for each in _all_of(self._scheduler))


def refuse_unstepped(rate: LearningRate) -> None:
    """ConfigError, in a run without validation data, if the schedule is stepped at evaluations."""
    if isinstance(rate, OwnRate) and rate.occasion == "evaluation":
        remedy = 'pass some, or set every="step" or "epoch"'
        raise _refusal(
            "is stepped at evaluations, but fit() has no validation data", remedy, rate.name
        )


def _plain_state(scheduler: Any) -> dict[str, Any]:
    """Return its state without functions: a resumed run rebuilds the scheduler with them."""
    state: dict[str, Any] = scheduler.state_dict()
    return {key: value for key, value in state.items() if not callable(value)}


def _all_of(scheduler: Any) -> Iterator[Any]:
    """Yield the scheduler and those it is composed of."""
    yield scheduler
    for inner in getattr(scheduler, "_schedulers", ()):
        yield from _all_of(inner)


_PROGRESS = {"last_epoch", "best", "num_bad_epochs", "cooldown_counter", "T_cur", "T_i"}
_PROBED = (1, 2, 5, 10, 100, 1000, 10_000, 100_000)


def _settings(scheduler: Any, where: str) -> Iterator[tuple[str, Any]]:
    """Yield the settings that determine its rates, as far as they are visible from outside."""
    for key, value in vars(scheduler).items():
        if key.startswith("_") or key in _PROGRESS:
            continue
        if key == "lr_lambdas":
            yield f"{where}.{key}", [[_probe(each, at) for at in _PROBED] for each in value]
        elif _is_plain(value):
            yield f"{where}.{key}", value
        elif isinstance(value, Mapping) and all(map(_is_plain, value.values())):
            yield f"{where}.{key}", {str(name): each for name, each in value.items()}
    inner = getattr(scheduler, "_schedulers", ())
    for index, each in enumerate(inner):
        yield f"{where}.{index}.class", type(each).__name__
        yield from _settings(each, f"{where}.{index}")


def _probe(function: Any, at: int) -> float | None:
    """Return the value of an opaque function; None where it fails or is not finite."""
    try:
        value = float(function(at))
    except Exception:  # a table that ends before this step
        return None
    return value if math.isfinite(value) else None


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return isinstance(value, (bool, int, str)) or (
        isinstance(value, float) and math.isfinite(value)
    )


def _metric(name: str, metrics: Mapping[str, float]) -> float:
    if name not in metrics:
        rule = "is not a metric of this evaluation"
        remedy = f"use one of {', '.join(sorted(metrics))}"
        raise ConfigError([Problem("LRSchedule.metric", rule, remedy, name)])
    return metrics[name]


def _refusal(rule: str, remedy: str, kind: str) -> ConfigError:
    return ConfigError([Problem("schedule", rule, remedy, kind)])
