"""From a task, data and a config to an engine and a feed that are ready to train."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from drivetrain.cluster.environments import detect
from drivetrain.config.provenance import ResolvedConfig
from drivetrain.config.schema import RunConfig
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.core.text import readable_bytes
from drivetrain.data.batches import BatchPlan, solve_micro_batch
from drivetrain.data.device import to_device
from drivetrain.data.evaluation import EvaluationFeed
from drivetrain.data.feed import Feed, MapFeed
from drivetrain.data.rank_check import RankCheck
from drivetrain.data.sampled_feed import SampledFeed
from drivetrain.data.sources import Source, refuse_one_pass, source_from
from drivetrain.data.stream import StreamFeed
from drivetrain.data.stream_shards import Shards, reads_shards
from drivetrain.parallel.batch_norm import Sharers, batch_norms, share_statistics
from drivetrain.parallel.blocks import recompute_blocks
from drivetrain.parallel.divide import divide
from drivetrain.parallel.model import ParallelModel
from drivetrain.parallel.neighbours import Neighbours
from drivetrain.parallel.pipeline.anatomy import part_costs
from drivetrain.parallel.pipeline.schedules import bubble
from drivetrain.parallel.several_models import ModelsByName, SeveralModels
from drivetrain.parallel.world import World, join_world, live_world
from drivetrain.record.rank_logging import share_console
from drivetrain.record.run_directory import micro_batch_so_far
from drivetrain.record.session import ProgressPage, earlier_directory, mark_training
from drivetrain.record.sinks import choose_sinks
from drivetrain.strategies.strategy import Profile, Strategy, strategy_from
from drivetrain.train.contract import (
    accepted_changes,
    agree_on_sampler,
    agree_on_tensors,
    model_terms,
    optimizer_terms,
)
from drivetrain.train.engine import Engine
from drivetrain.train.local_engine import engine_for
from drivetrain.train.muon import on_shards
from drivetrain.train.optimizers import from_config
from drivetrain.train.own_schedule import SchedulesByName, own_rate
from drivetrain.train.refusals import check_model, check_optimizer, checked
from drivetrain.train.schedule import CurveRate, LearningRate, RateCurve, batch_size_factor
from drivetrain.train.several_engine import SeveralRates
from drivetrain.train.several_optimizers import OptimizersByName, kind_of, members
from drivetrain.train.task import Task
from drivetrain.train.weights.source import (
    NewModel,
    agreed,
    later_model,
    whole_model,
    with_pretrained,
)


@dataclass(frozen=True)
class Prebuilt:
    """A model that exists already, with weights of its own: ranks take rank 0's."""

    model: nn.Module

    def __call__(self) -> nn.Module:
        """The model."""
        return self.model


@dataclass(frozen=True)
class Assembly:
    """Everything a run trains with."""

    resolved: ResolvedConfig
    world: World
    engine: Engine
    feed: Feed
    source: Source
    made: Mapping[str, Any]
    """The terms of the run's contract that are known of the model and the optimizer."""
    notes: tuple[str, ...]
    """What the user should read before the first step."""
    page: ProgressPage
    """Where this rank says what it does; its supervisor watches it."""
    unread: ConfigError | None = None
    """To be raised where no checkpoint has the weights that files should have had."""
    tokenizer: Any = None
    """What the task has of that kind."""

    @property
    def config(self) -> RunConfig:
        """The resolved config."""
        return self.resolved.config

    @property
    def total_steps(self) -> int | None:
        """None only for a stream that decides for itself how long an epoch is."""
        return _total_steps(self.config, self.feed.plan)


def assemble(
    task: Task, resolved: ResolvedConfig, source: Source, world: World | None = None
) -> Assembly:
    """Join the world, unless it is given; spread the model, and line up the data."""
    mark_training()
    identity = detect()
    share_console(resolved.config.record.log_ranks, identity.rank, identity.world_size)
    if os.environ.get("DRIVETRAIN_LIVE"):
        resolved = resolved.choose("fault_tolerance", "live", "drivetrain train --live")
    is_live = resolved.config.fault_tolerance == "live"
    is_own_world = world is None
    if world is None:
        world = live_world(identity) if is_live else join_world(identity, resolved.config.parallel)
    num_ranks = world.identity.world_size if is_live else world.layout.dp
    resolved = _choose(resolved, num_ranks, source)
    config = resolved.config
    source = source.settled(can_pin=not world.accelerator.is_cpu)
    micro_batch_size = int(config.micro_batch_size)
    length = source.epoch_length(micro_batch_size)
    plan = BatchPlan(config.global_batch_size, micro_batch_size, world.layout.dp, length)
    feed = make_feed(source, plan, world, config)
    total_steps = _total_steps(config, plan)
    _check_optimizer_keys(task, resolved)
    resolved = _choose_schedule(task, resolved)
    config = resolved.config
    _check_schedule(config, total_steps)
    if task.adapter is not None:
        task.adapter.on_planned(config, total_steps)
    strategy = strategy_from(config, plan.blocks())
    new = _new_model(task, strategy, world, config, is_rehearsed=not is_own_world)
    if is_own_world:  # a rehearsal needs no values, and has nobody to agree with
        new = _settled_model(new, feed, world, config, is_live=is_live)
    notes = _check_model(new.model, strategy, world, config, plan.accumulation) + new.notes
    made = model_terms(new.model) | {"model.pretrained": new.fingerprint}
    sharers = _share_batch_norms(new.model, world, config, notes)
    spread = _spread(task, new, strategy, world, config, source, plan)
    optimizer, terms = _make_optimizer(task, spread, config)
    made |= terms
    rate = _learning_rate(task, config, optimizer, total_steps)
    made |= rate.terms
    engine = engine_for(config, world, spread, optimizer, rate, total_steps)
    if sharers is not None:
        _keep_in_step(engine, sharers, config)
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
    )


def _make_optimizer(
    task: Task, spread: ParallelModel, config: RunConfig
) -> tuple[torch.optim.Optimizer, dict[str, Any]]:
    """The task's, and its terms; an engine that steps by itself takes it over after that."""
    optimizer = task.make_optimizer(spread.inner, config.optimization)
    for each in members(optimizer):
        check_optimizer(each)
        on_shards(each)
    terms = optimizer_terms(optimizer, task.optimizer)
    if spread.engine_step is not None:
        if len(members(optimizer)) > 1:
            rule = f"{config.parallel.strategy} steps one optimizer"
            remedy = "use one, or another parallel.strategy"
            raise ConfigError([Problem("optimizer", rule, remedy, kind_of(optimizer))])
        spread.engine_step.take_over(optimizer)
    return optimizer, terms


def _first_notes(plan: BatchPlan, resolved: ResolvedConfig) -> list[str]:
    notes = [f"batch: {plan}"]
    if plan.idle_warning:
        notes.append(f"warning: {plan.idle_warning}")
    if resolved.left_to_script:
        notes.append(f"left to the script: {', '.join(resolved.left_to_script)}")
    return notes


def make_feed(source: Source, plan: BatchPlan, world: World, config: RunConfig) -> Feed:
    """A rank's share of the training data."""
    if source.sampler is not None:
        ring = Neighbours.of(world, 3)
        feed = SampledFeed(source, source.sampler, plan, world.dp_index, config.seed, ring)
        feed.check_size()
        return feed
    if source.length is not None:
        return MapFeed(source, plan, world.dp_index, config.seed)

    shards = _shards(source, world, config)
    if shards is not None and plan.num_micro_batches % plan.num_ranks:
        rule = (
            f"{plan.num_micro_batches} micro-batches a step cannot be shared evenly by "
            f"{plan.num_ranks} ranks"
        )
        remedy = "change global_batch_size or micro_batch_size, or use same_stream"
        raise ConfigError([Problem("data.iterable_sharding", rule, remedy, shards.name)])
    check = _rank_check(source, world, config, shards)
    stream = StreamFeed(source, plan, world.dp_index, config.seed, shards, check)
    stream.accepts_other_data = "data.content" in accepted_changes()
    return stream


def _shards(source: Source, world: World, config: RunConfig) -> Shards | None:
    """How a stream's parts come to the ranks; None where each reads all of it."""
    sharding = config.data.iterable_sharding
    if world.layout.dp == 1 or not reads_shards(source.dataset, sharding):
        return None

    def sum_over_ranks(count: int) -> int:
        # ranks that share a slice have read the same
        sharers = world.layout.world_size // world.layout.dp
        return int(world.sum(torch.tensor([count], device=world.device)).item()) // sharers

    return Shards(sharding, sum_over_ranks)


def _rank_check(
    source: Source, world: World, config: RunConfig, shards: Shards | None
) -> RankCheck:
    sharding = config.data.iterable_sharding
    return RankCheck.of(world, source.dataset, sharding, shares_out=shards is not None)


def _total_steps(config: RunConfig, plan: BatchPlan) -> int | None:
    if config.max_steps is not None:
        return config.max_steps
    if plan.length is None or config.num_train_epochs is None:
        return None
    return plan.end_of(config.num_train_epochs - 1)


def _check_optimizer_keys(task: Task, resolved: ResolvedConfig) -> None:
    """A task with an optimizer of its own does not ask the config for one."""
    if task.optimizer is from_config:
        return
    said, rule = resolved.config.optimization, "the task has an optimizer of its own"
    problems = [
        Problem(f"optimization.{key}", rule, "leave one of them out", getattr(said, key))
        for key in ("optimizer", "momentum", "muon_dtype")
        if resolved.source(f"optimization.{key}").kind != "default"
    ]
    if problems:
        raise ConfigError(problems)


def _choose_schedule(task: Task, resolved: ResolvedConfig) -> ResolvedConfig:
    """A schedule of the task's own is the only one; what the config says beside it is refused."""
    if task.schedule is None:
        return resolved
    key = "optimization.lr_scheduler_type"
    said = resolved.config.optimization
    open_or_none = said.lr_scheduler_type == "none" or resolved.source(key).kind == "default"
    beside = {
        key: not open_or_none,
        "optimization.warmup_steps": bool(said.warmup_steps),
        "optimization.warmup_ratio": bool(said.warmup_ratio),
        "optimization.learning_rate_scaling": said.learning_rate_scaling != "none",
    }
    rule = "the task has a schedule of its own, and two would set one rate"
    problems = [
        Problem(name, rule, "leave one of them out", getattr(said, name.rpartition(".")[2]))
        for name, is_set in beside.items()
        if is_set
    ]
    if problems:
        raise ConfigError(problems)
    return resolved.choose(key, "none", "the task has a schedule of its own")


def _learning_rate(
    task: Task, config: RunConfig, optimizer: torch.optim.Optimizer, total_steps: int | None
) -> LearningRate:
    if isinstance(optimizer, OptimizersByName):
        schedules = task.schedule if isinstance(task.schedule, SchedulesByName) else {}
        rates = {
            name: _learning_rate(
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


def _check_schedule(config: RunConfig, total_steps: int | None) -> None:
    shape = config.optimization.lr_scheduler_type
    if total_steps is None and config.optimization.needs_the_end:
        raise ConfigError(
            [
                Problem(
                    "optimization.lr_scheduler_type",
                    "goes by the end of the run, and a stream's end is not known beforehand",
                    "set max_steps; or use constant, or decay_steps and warmup_steps",
                    shape,
                )
            ]
        )


def validation_sources(
    val: Any, config: RunConfig, *, read_often: bool = False
) -> dict[str, Source]:
    """Sets of validation data by name; where there is only one, its name is empty."""
    if val is None:
        return {}
    sources = {}
    for name, data in (val if _is_named_sets(val) else {"": val}).items():
        said = f"val[{name!r}]" if name else "val"
        if read_often:
            refuse_one_pass(data, said)
        sources[name] = source_from(data, config.data, said)
    return sources


def _is_named_sets(val: Any) -> bool:
    return isinstance(val, Mapping) and bool(val) and all(isinstance(name, str) for name in val)


def evaluation_feeds(
    sources: Mapping[str, Source], assembly: Assembly
) -> dict[str, EvaluationFeed]:
    """A rank's share of each set of validation data."""
    return {name: make_evaluation_feed(source, assembly) for name, source in sources.items()}


def make_evaluation_feed(
    source: Source, assembly: Assembly, *, whole: bool = False
) -> EvaluationFeed:
    """A rank's share of the validation data; `assemble` has chosen the batch size if need be."""
    world, config = assembly.world, assembly.config
    source = source.settled(can_pin=not world.accelerator.is_cpu)
    batch_size = config.evaluation.batch_size or int(config.micro_batch_size)
    parts: dict[str, Any] = {"max_samples": None if whole else config.evaluation.max_samples}
    if source.sampler is not None:
        parts["drawn"] = source.sampler.check_repeatable(config.seed)
    if source.length is None:
        parts["shards"] = _shards(source, world, config)
        parts["check"] = _rank_check(source, world, config, parts["shards"])
    return EvaluationFeed(source, batch_size, world.dp_index, world.layout.dp, **parts)


def _choose(resolved: ResolvedConfig, num_ranks: int, source: Source) -> ResolvedConfig:
    """Fill in what the user left open, each with its reason."""
    if resolved.config.evaluation.batch_size is None:
        micro = resolved.config.micro_batch_size
        size = min(32, resolved.config.global_batch_size) if micro == "auto" else micro
        why = "the same at any number of ranks" if micro == "auto" else "micro_batch_size"
        resolved = resolved.choose("evaluation.batch_size", size, why)
    if resolved.config.model.initialization == "auto":
        reads = resolved.config.model.pretrained is not None
        how = "keyed" if reads else "sequential"
        why = "only what the files lack is drawn" if reads else "as plain torch under this seed"
        resolved = resolved.choose("model.initialization", how, why)
    if resolved.config.record.sinks == "auto":
        resolved = resolved.choose("record.sinks", *choose_sinks())
    if resolved.config.micro_batch_size == "auto":
        earlier = micro_batch_so_far(earlier_directory())
        if earlier is not None and resolved.config.global_batch_size % earlier == 0:
            return resolved.choose("micro_batch_size", earlier, "as in this run's first attempt")
        if source.sampler is not None and source.sampler.yields_batches:
            largest = source.sampler.largest(source.sampler.draw(resolved.config.seed, 0))
            if resolved.config.global_batch_size % largest:
                rule = f"is no multiple of the batch sampler's batches of up to {largest}"
                size = max(1, resolved.config.global_batch_size // largest) * largest
                value = resolved.config.global_batch_size
                raise ConfigError([Problem("global_batch_size", rule, f"use {size}", value)])
            return resolved.choose("micro_batch_size", largest, "the batch sampler's batches")
    return solve_micro_batch(resolved, num_ranks)


def _new_model(
    task: Task, strategy: Strategy, world: World, config: RunConfig, *, is_rehearsed: bool
) -> NewModel:
    """Made without its weights where a rank holds a part of them, or they are drawn apart."""
    if isinstance(task.model, Prebuilt):
        model = task.model()
        agree_on_tensors(model, world)  # tensors of another size would end the process in gloo
        world.share_weights(model)
        return NewModel(model)
    layout, pipeline = world.layout, config.parallel.pipeline
    is_cut = strategy.shards_on(world) is not None or layout.tp * layout.pp > 1
    is_run_first = layout.pp > 1 and pipeline.balance == "time"
    comes_later = config.model.initialization == "keyed" or config.model.pretrained is not None
    if is_rehearsed or is_run_first or not (is_cut or comes_later):
        return whole_model(checked(task.model), world, config)
    return later_model(checked(task.model), world, config)


def _settled_model(
    new: NewModel, feed: Feed, world: World, config: RunConfig, *, is_live: bool
) -> NewModel:
    """The same on every rank, with the weights that files have. A collective call."""
    if not is_live:
        new = agreed(new, world)
        if isinstance(feed, SampledFeed):
            agree_on_sampler(feed, world)
    is_resumed = bool(earlier_directory() or config.checkpoint.resume_from)
    return with_pretrained(new, config.model, world, is_resumed=is_resumed)


def _check_model(
    model: nn.Module, strategy: Strategy, world: World, config: RunConfig, accumulation: int
) -> list[str]:
    """ConfigError where it cannot be trained so; or what the user should read of it."""
    check_model(model, world.identity.world_size)
    profile = Profile.of(model, accumulation)
    problems = strategy.problems(profile, world.layout, world.cluster)
    if problems:
        raise ConfigError(problems)
    cost = strategy.cost(profile, world.layout, world.cluster)
    notes = [
        f"model: {profile.num_parameters:,} parameters, {config.parallel.strategy} on "
        f"{world.layout} ({world.device.type}): {readable_bytes(cost.state_bytes)} of state per "
        f"rank, {readable_bytes(cost.sent_bytes_per_step)} sent per step"
    ]
    notes += strategy.notes(model, world)
    if config.checkpoint.contents == "trained":
        notes.append(_what_is_saved(model))
    if world.layout.pp > 1:
        idle = bubble(config.parallel.pipeline, world.layout.pp, accumulation)
        notes.append(
            f"pipeline: {config.parallel.pipeline.schedule}, {accumulation} micro-batches; a rank "
            f"idles {idle:.0%} of a step if stages take equally long"
        )
    return notes


def _share_batch_norms(
    model: nn.Module, world: World, config: RunConfig, notes: list[str]
) -> Sharers | None:
    """Where there are any, and copies of the model; or a word on what they go by."""
    norms = batch_norms(model) if world.layout.dp > 1 else {}
    if not norms:
        return None
    layers = f"{len(norms)} layers" if len(norms) > 1 else f"layer {next(iter(norms))}"
    if config.parallel.sync_batch_norm:
        notes.append(f"batch norm: {layers}, with statistics of all ranks' micro-batches together")
        return share_statistics(model, world.copies)
    if config.reproducibility != "bitwise":  # that has a word of its own
        notes.append(
            f"batch norm: {layers}, with each micro-batch's own statistics; the running ones that "
            "are saved are rank 0's (parallel.sync_batch_norm takes both over all ranks)"
        )
    return None


def _keep_in_step(engine: Engine, sharers: Sharers, config: RunConfig) -> None:
    """Ranks wait for each other in a forward: all make the same number of them."""
    rule = ""
    if engine.spread.local_steps is not None:
        rule = f"with {config.parallel.strategy} ranks train alone between two agreements"
    if isinstance(engine.spread, SeveralModels):
        rule = "there are several models, each with forwards of its own"
    if rule:
        raise ConfigError([Problem("parallel.sync_batch_norm", rule, "leave it out", "true")])
    engine.spread.needs_every_turn = True
    engine.sharers = sharers


def _what_is_saved(model: nn.Module) -> str:
    parameters = list(model.parameters())
    trained = sum(p.nbytes for p in parameters if p.requires_grad)
    return (
        f"checkpoints: of {readable_bytes(sum(p.nbytes for p in parameters))} of weights the "
        f"{readable_bytes(trained)} that are trained, with their optimizer state; the script makes "
        "the others again at every start"
    )


def _spread(
    task: Task,
    new: NewModel,
    strategy: Strategy,
    world: World,
    config: RunConfig,
    source: Source,
    plan: BatchPlan,
) -> ParallelModel:
    """Divide the model along tp, pp and cp, then make copies or shards of what is left.

    Weights that come later come where nothing is left to be cut.
    """
    model = new.model

    def measure(model: nn.Module) -> dict[str, float]:
        batch = to_device(source.first_batch(plan.micro_batch_size), world.device)
        costs = part_costs(model, lambda model: task.loss(model, batch))
        shared: dict[str, float] = json.loads(world.agree(json.dumps(costs)))
        return shared

    if isinstance(model, ModelsByName):
        return _spread_each(model, strategy, world, config)
    cut = divide(model, config.parallel, world, plan.accumulation, measure)
    if config.memory.activation_checkpointing != "none":
        recompute_blocks(model, config.memory.activation_checkpointing)
    if config.compile.enabled:
        model.compile(backend=config.compile.backend, mode=config.compile.mode)
    shards_on = strategy.shards_on(world)
    if shards_on is None:
        new.fill(world.device, world.device)
    spread = strategy.apply(model, world)
    if shards_on is not None:
        new.fill(shards_on, world.device)
    if cut is None or world.mesh is None:
        return spread
    from drivetrain.parallel.pipeline.pipelined import Pipelined

    group = world.mesh.get_group("pp")
    copies = world.copies if world.layout.dp > 1 else None
    return Pipelined(spread, cut, config.parallel.pipeline, group, copies)


def _spread_each(
    models: ModelsByName, strategy: Strategy, world: World, config: RunConfig
) -> ParallelModel:
    """Each of several models by itself; none is divided."""
    parallel = config.parallel
    rule = "several models are copied or sharded, each by itself, not divided"
    divided = [axis for axis in ("pp", "cp", "tp") if getattr(parallel, axis) > 1]
    if divided:
        key, value = f"parallel.{divided[0]}", getattr(parallel, divided[0])
        raise ConfigError([Problem(key, rule, "leave it at 1", value)])
    parts = {}
    for name, model in models.items():
        if config.memory.activation_checkpointing != "none":
            recompute_blocks(model, config.memory.activation_checkpointing)
        if config.compile.enabled:
            model.compile(backend=config.compile.backend, mode=config.compile.mode)
        parts[name] = strategy.apply_beside_others(model, world)
    return SeveralModels(parts)
