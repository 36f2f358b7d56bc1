"""Build the optimizer and the learning rate from the task or the config."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from drivetrain.config.schema import RunConfig
from drivetrain.config.script_reads import OPTIMIZER_KEYS
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.parallel.model import ParallelModel
from drivetrain.parallel.world import World
from drivetrain.train.contract import optimizer_terms
from drivetrain.train.optimization.muon import on_shards
from drivetrain.train.optimization.optimizers import from_config
from drivetrain.train.optimization.own_optimizer import WatchedSection
from drivetrain.train.optimization.own_schedule import SchedulesByName, own_rate
from drivetrain.train.optimization.schedule import (
    CurveRate,
    LearningRate,
    RateCurve,
    batch_size_factor,
)
from drivetrain.train.refusals import check_optimizer
from drivetrain.train.several.engine import SeveralRates
from drivetrain.train.several.optimizers import OptimizersByName, kind_of, members
from drivetrain.train.task import Task


def make_optimizer(
    task: Task, spread: ParallelModel, config: RunConfig, world: World
) -> tuple[torch.optim.Optimizer, dict[str, Any], frozenset[str]]:
    """Return the task's optimizer, its contract terms, and the config's keys that nobody read.

    An engine that steps by itself takes the optimizer over. A collective call.
    """
    section = WatchedSection.of(config.optimization)
    optimizer = task.make_optimizer(spread.inner, section)
    unread = frozenset() if task.optimizer is from_config else _unread(section, world)
    for each in members(optimizer):
        check_optimizer(each)
        on_shards(each)
    terms = optimizer_terms(optimizer, task.optimizer, unread)
    if spread.engine_step is not None:
        if len(members(optimizer)) > 1:
            rule = f"{config.parallel.strategy} supports only one optimizer"
            remedy = "use one, or a different parallel.strategy"
            raise ConfigError([Problem("optimizer", rule, remedy, kind_of(optimizer))])
        spread.engine_step.take_over(optimizer)
    return optimizer, terms, unread


def _unread(section: WatchedSection, world: World) -> frozenset[str]:
    """Return the keys that no rank's script has read; one rank may read them to print them."""
    readers = world.sum_floats([float(key not in section.unread) for key in OPTIMIZER_KEYS])
    return frozenset(key for key, n in zip(OPTIMIZER_KEYS, readers, strict=True) if not n)


def learning_rate(
    task: Task, config: RunConfig, optimizer: torch.optim.Optimizer, total_steps: int | None
) -> LearningRate:
    if isinstance(optimizer, OptimizersByName):
        schedules = task.schedule if isinstance(task.schedule, SchedulesByName) else {}
        rates = {
            name: learning_rate(
                replace(task, schedule=schedules.get(name)), config, each, total_steps
            )
            for name, each in optimizer.by_name.items()
        }
        return SeveralRates(optimizer, rates)
    if task.schedule is not None:
        return own_rate(task.schedule, optimizer, total_steps)
    if config.optimization.lr_scheduler_type == "none":
        return LearningRate(optimizer)
    factor = batch_size_factor(config.optimization, config.global_batch_size)
    return CurveRate(optimizer, RateCurve.of(config.optimization, total_steps), factor)
