"""The optimizer and learning rate of a run, and the config keys that have no effect on them.

A key has none if the script brings its own optimizer or schedule and does not use the key there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from drivetrain.config.keys import flatten
from drivetrain.config.provenance import ResolvedConfig, SourceKind
from drivetrain.config.script_reads import OPTIMIZER_KEYS, may_use_anything
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.parallel.model import ParallelModel
from drivetrain.parallel.world import World
from drivetrain.train.optimization.build import learning_rate, make_optimizer
from drivetrain.train.optimization.own_optimizer import has_value, peaks, shown
from drivetrain.train.optimization.schedule import LearningRate
from drivetrain.train.setup.without_effect import is_refused, repeats_default, values_so_far
from drivetrain.train.task import Task

_RATE = "optimization.learning_rate"


@dataclass(frozen=True)
class Optimizing:
    """How a run's weights are updated."""

    optimizer: torch.optim.Optimizer
    rate: LearningRate
    terms: Mapping[str, Any]
    """Terms of the run's contract."""
    resolved: ResolvedConfig
    """The config, with the keys that have no effect."""
    warnings: list[str]
    sets_own_rate: bool
    """Whether the script makes the optimizer, without reading the config's learning rate."""


def set_up_optimizer(
    task: Task,
    resolved: ResolvedConfig,
    spread: ParallelModel,
    world: World,
    total_steps: int | None,
) -> Optimizing:
    """Build the optimizer and the learning rate; ConfigError for set keys without effect."""
    config = resolved.config
    optimizer, terms, unread = make_optimizer(task, spread, config, world)
    resolved, warnings = _settle_optimizer_keys(resolved, unread, optimizer)
    before = peaks(optimizer)
    rate = learning_rate(task, config, optimizer, total_steps)
    if task.schedule is not None:
        warnings += _warn_of_replaced_rate(resolved, before, optimizer)
    terms |= rate.terms
    return Optimizing(optimizer, rate, terms, resolved, warnings, "learning_rate" in unread)


def _settle_optimizer_keys(
    resolved: ResolvedConfig, unread: Collection[str], optimizer: torch.optim.Optimizer
) -> tuple[ResolvedConfig, list[str]]:
    """Settle the keys that the script's own optimizer neither read nor has the value of."""
    section = resolved.config.optimization
    keys = [key for key in OPTIMIZER_KEYS if key in unread]
    without_effect = {
        f"optimization.{key}": f"the script has its own optimizer ({shown(optimizer, key)}), which "
        "does not use it"
        for key in keys
        if not has_value(optimizer, key, getattr(section, key))
    }
    remedy = "set it in the script, use the config's value there, or leave out the optimizer"
    # what the script sets itself is constant: nobody waits for an effect
    refused: tuple[SourceKind, ...] = () if may_use_anything() else ("command line", "file")
    return settle(resolved, without_effect, remedy, refused)


def settle(
    resolved: ResolvedConfig,
    without_effect: Mapping[str, str],
    remedy: str,
    refused: Collection[SourceKind] = ("command line", "file", "script"),
) -> tuple[ResolvedConfig, list[str]]:
    """Record why keys have no effect; ConfigError if the user set one of them at such a place.

    A key set elsewhere gives a warning, and so does a value with which the resumed run began. A
    default that is written in a file or the script says nothing.
    """
    values = flatten(resolved.config.model_dump(mode="json"))
    before = values_so_far()
    problems, warnings = [], []
    for path, why in without_effect.items():
        source, value = resolved.source(path), values[path]
        if is_refused(path, value, source, before, refused):
            problems.append(Problem(path, f"set {source.where}, but {why}", remedy, value))
        elif source.is_users and not repeats_default(path, value, source):
            warnings.append(f"warning: {path} = {value} has no effect: {why}")
        resolved = resolved.unused(path, why)
    if problems:
        raise ConfigError(problems)
    return resolved, warnings


def _warn_of_replaced_rate(
    resolved: ResolvedConfig, before: Collection[float], optimizer: torch.optim.Optimizer
) -> list[str]:
    """Return a warning if the script's schedule replaced the rates made from learning_rate.

    OneCycleLR and CyclicLR do so; torch's other schedulers multiply the optimizer's rates.
    """
    source = resolved.source(_RATE)
    if not source.is_users or peaks(optimizer) & set(before):
        return []
    value, rate = resolved.config.optimization.learning_rate, optimizer.param_groups[0]["lr"]
    return [
        f"warning: {_RATE} = {value} (set {source.where}): the script's schedule replaces it, and "
        f"the rate starts at {float(rate):g}"
    ]
