"""Build an engine and a feed that are ready to train from a task, data and a config."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from drivetrain.cluster.environments import detect
from drivetrain.config.provenance import ResolvedConfig
from drivetrain.config.schema import RunConfig
from drivetrain.core.errors import ConfigError
from drivetrain.data.batches import BatchPlan
from drivetrain.data.feed import Feed
from drivetrain.data.sources import Source
from drivetrain.parallel.world import World, join_world, live_world
from drivetrain.record.rank_logging import share_console
from drivetrain.record.session import ProgressPage, mark_training
from drivetrain.strategies.strategy import Profile, strategy_from
from drivetrain.train.contract import model_terms
from drivetrain.train.engine import Engine
from drivetrain.train.host_memory import give_back_freed
from drivetrain.train.local_engine import engine_for
from drivetrain.train.numerics.float8 import use_float8
from drivetrain.train.setup.choices import (
    check_schedule,
    choose_what_is_brought,
    fill_in,
    total_steps_of,
)
from drivetrain.train.setup.experts import count_load, expert_load
from drivetrain.train.setup.feeds import make_feed
from drivetrain.train.setup.model import (
    describe_model,
    keep_in_step,
    new_model,
    note_on_dropout,
    settled_model,
    share_batch_norms,
    spread_model,
)
from drivetrain.train.setup.optimizer import set_up_optimizer
from drivetrain.train.setup.schedule_length import note_on_schedule_length
from drivetrain.train.task import Task


@dataclass(frozen=True)
class Assembly:
    """Everything that a run trains with."""

    resolved: ResolvedConfig
    world: World
    engine: Engine
    feed: Feed
    source: Source
    made: Mapping[str, Any]
    """Terms of the run's contract that come from the model and the optimizer."""
    notes: tuple[str, ...]
    """Lines to show before the first step."""
    page: ProgressPage
    """Where this rank reports its phase; its supervisor watches it."""
    unread: ConfigError | None = None
    """Error to raise if no checkpoint has the weights that could not be read from files."""
    tokenizer: Any = None
    """The task's tokenizer."""
    weight_bytes: int = 0
    """Size of the whole model's parameters."""
    has_own_optimizer: bool = False
    """Whether the script makes the optimizer, without reading the config's learning rate."""

    @property
    def config(self) -> RunConfig:
        """The resolved config."""
        return self.resolved.config

    @property
    def total_steps(self) -> int | None:
        """Steps of the whole run; None for a stream whose length is unknown."""
        return total_steps_of(self.config, self.feed.plan)


def _keeps_all_in_run(config: RunConfig) -> bool:
    """Whether the run can start only from checkpoints in its own directory."""
    return config.checkpoint.directory is None and config.checkpoint.resume_from is None


def assemble(
    task: Task, resolved: ResolvedConfig, source: Source, world: World | None = None
) -> Assembly:
    """Join the world, unless it is given; distribute the model and set up the data."""
    mark_training(keeps_all=_keeps_all_in_run(resolved.config))
    identity = detect()
    share_console(resolved.config.record.log_ranks, identity.rank, identity.world_size)
    if os.environ.get("DRIVETRAIN_LIVE"):
        resolved = resolved.choose("fault_tolerance", "live", "drivetrain train --live")
    is_live = resolved.config.fault_tolerance == "live"
    is_own_world = world is None
    if world is None:
        world = live_world(identity) if is_live else join_world(identity, resolved.config.parallel)
    num_ranks = world.identity.world_size if is_live else world.layout.dp
    resolved = fill_in(resolved, num_ranks, source, is_main=world.is_main)
    config = resolved.config
    source = source.settled(can_pin=not world.accelerator.is_cpu)
    micro_batch_size = int(config.micro_batch_size)
    length = source.epoch_length(micro_batch_size)
    plan = BatchPlan(config.global_batch_size, micro_batch_size, world.layout.dp, length)
    feed = make_feed(source, plan, world, config)
    total_steps = total_steps_of(config, plan)
    resolved, warnings = choose_what_is_brought(task, resolved, source)
    config = resolved.config
    check_schedule(config, total_steps)
    if task.adapter is not None:
        task.adapter.on_planned(config, total_steps)
    strategy = strategy_from(config, plan.blocks())
    if is_own_world and config.parallel.traits.shards and world.accelerator.is_cpu:
        give_back_freed()
    new = new_model(task, strategy, world, config, is_rehearsed=not is_own_world)
    if is_own_world:  # a rehearsal needs no values and has no other ranks
        new = settled_model(new, feed, world, config, is_live=is_live)
    notes = describe_model(new.model, strategy, world, config, plan.accumulation) + new.notes
    notes += note_on_dropout(new.model, resolved) + use_float8(new.model, config.precision)
    weight_bytes = Profile.of(new.model).parameter_bytes
    made = model_terms(new.model) | {"model.pretrained": new.fingerprint}
    sharers = share_batch_norms(new.model, world, config, notes)
    load = expert_load(new.model, world, config, notes) if is_own_world else None
    spread = spread_model(task, new, strategy, world, config, source, plan)
    optimizing = set_up_optimizer(task, resolved, spread, world, total_steps)
    resolved = optimizing.resolved
    notes += (
        warnings
        + optimizing.warnings
        + note_on_schedule_length(
            optimizing.rate, config, plan, total_steps, world.identity.world_size
        )
    )
    made |= optimizing.terms
    engine = engine_for(config, world, spread, optimizing.optimizer, optimizing.rate, total_steps)
    if sharers is not None:
        keep_in_step(engine, sharers, config)
    count_load(engine, load, config)
    for choice in spread.choices():
        resolved = resolved.choose(choice.key, choice.value, choice.why)
        notes.append(choice.said)
    notes += spread.notes()
    page = ProgressPage.of_this_rank(world.identity.local_rank)
    told = (*_first_notes(plan, resolved), *notes)
    return Assembly(
        resolved,
        world,
        engine,
        feed,
        source,
        made,
        told,
        page,
        unread=new.unread,
        tokenizer=task.tokenizer,
        weight_bytes=weight_bytes,
        has_own_optimizer=optimizing.sets_own_rate,
    )


def _first_notes(plan: BatchPlan, resolved: ResolvedConfig) -> list[str]:
    notes = [f"batch: {plan}"]
    if plan.idle_warning:
        notes.append(f"warning: {plan.idle_warning}")
    if resolved.left_to_script:
        flags = ", ".join(resolved.left_to_script)
        notes.append(
            f"passed to the script: {flags} (not a config key: ignored unless the script reads it)"
        )
    return notes
