"""Convert what `configure_optimizers` returns to an optimizer and an LRSchedule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from drivetrain.core.errors import ConfigError, Problem
from drivetrain.train.optimization.own_schedule import LRSchedule

_SHAPES = 'return an optimizer, or {"optimizer": optimizer, "lr_scheduler": scheduler}'
_KEYS = {"scheduler", "interval", "frequency", "monitor", "strict", "name", "reduce_on_plateau"}


def read_optimizers(returned: Any) -> tuple[torch.optim.Optimizer, LRSchedule | None]:
    """Return the optimizer and its schedule, if any; ConfigError for anything else."""
    optimizers, schedulers, monitor = _taken_apart(returned)
    if not all(isinstance(each, torch.optim.Optimizer) for each in optimizers):
        raise _refusal("is not an optimizer", _SHAPES, returned)
    if len(optimizers) != 1:
        rule = f"returned {len(optimizers)} optimizers, which only manual optimization can step"
        remedy = "write your own loop: drivetrain.prepare takes several models"
        raise _refusal(rule, remedy, returned)
    if len(schedulers) > 1:
        remedy = "chain them: torch.optim.lr_scheduler.ChainedScheduler"
        raise _refusal(f"returned {len(schedulers)} schedulers for one optimizer", remedy, returned)
    return optimizers[0], _schedule(schedulers[0], monitor) if schedulers else None


def _taken_apart(returned: Any) -> tuple[list[Any], list[Any], str | None]:
    if isinstance(returned, Mapping):
        schedulers = [returned["lr_scheduler"]] if returned.get("lr_scheduler") else []
        return [returned.get("optimizer")], schedulers, returned.get("monitor")
    if not isinstance(returned, (list, tuple)):
        return [returned], [], None
    if len(returned) == 2 and isinstance(returned[0], list):
        schedulers = returned[1] if isinstance(returned[1], list) else [returned[1]]
        return returned[0], schedulers, None
    if returned and all(isinstance(each, Mapping) for each in returned):
        parts = [_taken_apart(each) for each in returned]
        return [o for p in parts for o in p[0]], [s for p in parts for s in p[1]], parts[0][2]
    return list(returned), [], None


def _schedule(given: Any, monitor: str | None) -> LRSchedule:
    said: Mapping[str, Any] = given if isinstance(given, Mapping) else {"scheduler": given}
    scheduler = said.get("scheduler")
    unknown = sorted(said.keys() - _KEYS)
    if scheduler is None or unknown:
        rule = f"has the unknown key {unknown[0]!r}" if unknown else "has no scheduler"
        raise _refusal(f"lr_scheduler {rule}", f"valid keys are {', '.join(sorted(_KEYS))}", given)
    if said.get("frequency", 1) != 1:
        rule = f"lr_scheduler has frequency {said['frequency']}"
        raise _refusal(rule, "use 1, and a scheduler that does its own counting", given)
    interval = said.get("interval", "epoch")
    if interval not in ("step", "epoch"):
        raise _refusal(f"lr_scheduler has interval {interval!r}", "use step or epoch", given)
    if not isinstance(scheduler, ReduceLROnPlateau):
        return LRSchedule(scheduler, every=interval)
    metric = said.get("monitor") or monitor
    if metric is None:
        rule = "has a ReduceLROnPlateau without a monitor"
        raise _refusal(rule, 'add "monitor": a name that validation_step logs', given)
    if interval == "step":
        rule = "steps a ReduceLROnPlateau at each step"
        raise _refusal(rule, "leave interval out: it is stepped after each evaluation", given)
    return LRSchedule(scheduler, every="evaluation", metric=metric)


def _refusal(rule: str, remedy: str, value: Any) -> ConfigError:
    return ConfigError([Problem("configure_optimizers", rule, remedy, type(value).__name__)])
