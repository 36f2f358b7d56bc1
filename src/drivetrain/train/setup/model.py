"""Build, check and distribute the model."""

from __future__ import annotations

import json
from dataclasses import dataclass

from torch import nn

from drivetrain.config.provenance import ResolvedConfig
from drivetrain.config.schema import RunConfig
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.core.text import readable_bytes
from drivetrain.data.batches import BatchPlan
from drivetrain.data.device import to_device
from drivetrain.data.feed import Feed
from drivetrain.data.sampled_feed import SampledFeed
from drivetrain.data.sources import Source
from drivetrain.parallel.batch_norm import Sharers, batch_norms, share_statistics
from drivetrain.parallel.blocks import recompute_blocks
from drivetrain.parallel.divide import divide
from drivetrain.parallel.micro_batch import has_dropout
from drivetrain.parallel.model import ParallelModel
from drivetrain.parallel.pipeline.anatomy import part_costs
from drivetrain.parallel.pipeline.schedules import bubble
from drivetrain.parallel.several_models import ModelsByName, SeveralModels
from drivetrain.parallel.world import World
from drivetrain.record.session import earlier_directory
from drivetrain.strategies.strategy import Profile, Strategy
from drivetrain.train.contract import agree_on_model, agree_on_sampler
from drivetrain.train.engine import Engine
from drivetrain.train.refusals import check_model, check_undistributed, checked
from drivetrain.train.task import Task
from drivetrain.train.weights.source import (
    NewModel,
    agreed,
    later_model,
    whole_model,
    with_pretrained,
)

_SEED = (
    "; if they are drawn at random, call torch.manual_seed(…) before creating the model, so that "
    "every start begins alike"
)


@dataclass(frozen=True)
class Prebuilt:
    """A model that already exists, with its weights: all ranks take rank 0's."""

    model: nn.Module

    def __call__(self) -> nn.Module:
        return self.model


def new_model(
    task: Task, strategy: Strategy, world: World, config: RunConfig, *, is_rehearsed: bool
) -> NewModel:
    """Build the model, without weights if a rank holds only a part or they are set later."""
    if isinstance(task.model, Prebuilt):
        model = task.model()
        check_undistributed(model)
        notes = agree_on_model(model, world)
        world.share_weights(model)  # the comparison is of a few values
        return NewModel(model, notes=[] if _is_resumed(config) else [n + _SEED for n in notes])
    layout, pipeline = world.layout, config.parallel.pipeline
    is_cut = strategy.shards_on(world) is not None or layout.tp * layout.pp > 1
    is_run_first = layout.pp > 1 and pipeline.balance == "time"
    comes_later = config.model.initialization == "keyed" or config.model.pretrained is not None
    if is_rehearsed or is_run_first or not (is_cut or comes_later):
        return whole_model(checked(task.model), world, config)
    return later_model(checked(task.model), world, config)


def settled_model(
    new: NewModel, feed: Feed, world: World, config: RunConfig, *, is_live: bool
) -> NewModel:
    """Make the model the same on every rank, with weights from files. A collective call."""
    if not is_live:
        new = agreed(new, world)
        if isinstance(feed, SampledFeed):
            agree_on_sampler(feed, world)
    return with_pretrained(new, config.model, world, is_resumed=_is_resumed(config))


def _is_resumed(config: RunConfig) -> bool:
    return bool(earlier_directory() or config.checkpoint.resume_from)


def describe_model(
    model: nn.Module, strategy: Strategy, world: World, config: RunConfig, accumulation: int
) -> list[str]:
    """Return notes on the model for the user; ConfigError if it cannot be trained this way."""
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
        f"{', tokens not counted' if world.layout.ep > 1 else ''}"
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


def _what_is_saved(model: nn.Module) -> str:
    parameters = list(model.parameters())
    trained = sum(p.nbytes for p in parameters if p.requires_grad)
    return (
        f"checkpoints: of {readable_bytes(sum(p.nbytes for p in parameters))} of weights only the "
        f"{readable_bytes(trained)} that are trained, with their optimizer state; the script "
        "recreates the others at every start"
    )


def share_batch_norms(
    model: nn.Module, world: World, config: RunConfig, notes: list[str]
) -> Sharers | None:
    """Share batch norm's statistics if configured, and add a note; None if not shared."""
    norms = batch_norms(model) if world.layout.dp > 1 else {}
    if not norms:
        return None
    layers = f"{len(norms)} layers" if len(norms) > 1 else f"layer {next(iter(norms))}"
    if config.parallel.sync_batch_norm:
        notes.append(f"batch norm: {layers}, with statistics over all ranks' micro-batches")
        return share_statistics(model, world.copies)
    if config.reproducibility != "bitwise":  # it has its own note
        notes.append(
            f"batch norm: {layers}, with each micro-batch's own statistics; the saved running "
            "statistics are rank 0's (parallel.sync_batch_norm computes both over all ranks)"
        )
    return None


def note_on_dropout(model: nn.Module, resolved: ResolvedConfig) -> list[str]:
    """Return a note if dropout masks would differ on another number of ranks."""
    if not has_dropout(model) or resolved.source("micro_batch_size").kind != "chosen":
        return []
    size = resolved.config.micro_batch_size
    return [
        f"dropout: masks are drawn for each micro-batch, and micro_batch_size={size} was chosen "
        "for this number of ranks; set it explicitly to draw the same masks on any number"
    ]


def keep_in_step(engine: Engine, sharers: Sharers, config: RunConfig) -> None:
    """Let all ranks make the same number of forwards, in which they wait for each other."""
    rule = ""
    if engine.spread.local_steps is not None:
        rule = f"with {config.parallel.strategy} ranks train alone between synchronizations"
    if isinstance(engine.spread, SeveralModels):
        rule = "there are several models, each with its own forward passes"
    if rule:
        raise ConfigError([Problem("parallel.sync_batch_norm", rule, "leave it out", "true")])
    engine.spread.needs_every_turn = True
    engine.sharers = sharers


def spread_model(
    task: Task,
    new: NewModel,
    strategy: Strategy,
    world: World,
    config: RunConfig,
    source: Source,
    plan: BatchPlan,
) -> ParallelModel:
    """Divide the model along tp, pp and cp, then replicate or shard the result.

    Weights that are set later are filled in once the model has been divided and sharded.
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
    """Distribute each of several models by itself; none is divided."""
    parallel = config.parallel
    rule = "several models can be replicated or sharded, each by itself, but not divided"
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
