"""A rank's share of the training and validation data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from drivetrain.config.schema import RunConfig
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.data.batches import BatchPlan
from drivetrain.data.evaluation import EvaluationFeed
from drivetrain.data.feed import Feed, MapFeed
from drivetrain.data.rank_check import RankCheck
from drivetrain.data.sampled_feed import SampledFeed
from drivetrain.data.sources import Source, refuse_one_pass, source_from
from drivetrain.data.stream import StreamFeed
from drivetrain.data.stream_shards import Shards, reads_shards
from drivetrain.parallel.neighbours import Neighbours
from drivetrain.parallel.world import World
from drivetrain.train.contract import accepted_changes


def make_feed(source: Source, plan: BatchPlan, world: World, config: RunConfig) -> Feed:
    """Return a rank's share of the training data."""
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
            f"{plan.num_micro_batches} micro-batches per step cannot be divided evenly among "
            f"{plan.num_ranks} ranks"
        )
        remedy = "change global_batch_size or micro_batch_size, or use same_stream"
        raise ConfigError([Problem("data.iterable_sharding", rule, remedy, shards.name)])
    check = _rank_check(source, world, config, shards)
    stream = StreamFeed(source, plan, world.dp_index, config.seed, shards, check)
    stream.accepts_other_data = "data.content" in accepted_changes()
    return stream


def evaluation_feeds(
    sources: Mapping[str, Source], world: World, config: RunConfig
) -> dict[str, EvaluationFeed]:
    """Return a rank's share of each set of validation data."""
    return {name: evaluation_feed(source, world, config) for name, source in sources.items()}


def evaluation_feed(
    source: Source, world: World, config: RunConfig, *, whole: bool = False
) -> EvaluationFeed:
    """Return a rank's share of the validation data; `whole` ignores evaluation.max_samples."""
    source = source.settled(can_pin=not world.accelerator.is_cpu)
    batch_size = config.evaluation.batch_size or int(config.micro_batch_size)
    parts: dict[str, Any] = {"max_samples": None if whole else config.evaluation.max_samples}
    if source.sampler is not None:
        parts["drawn"] = source.sampler.check_repeatable(config.seed)
    if source.length is None:
        parts["shards"] = _shards(source, world, config)
        parts["check"] = _rank_check(source, world, config, parts["shards"])
    return EvaluationFeed(source, batch_size, world.dp_index, world.layout.dp, **parts)


def validation_sources(
    val: Any, config: RunConfig, *, read_often: bool = False
) -> dict[str, Source]:
    """Return the sets of validation data by name; a single set has an empty name."""
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


def _shards(source: Source, world: World, config: RunConfig) -> Shards | None:
    """Return how a stream is divided among the ranks; None if each reads all of it."""
    sharding = config.data.iterable_sharding
    if world.layout.dp == 1 or not reads_shards(source.dataset, sharding):
        return None

    def sum_over_ranks(count: int) -> int:
        # ranks of the same data-parallel slice have read the same
        sharers = world.layout.world_size // world.layout.dp
        return int(world.sum(torch.tensor([count], device=world.device)).item()) // sharers

    return Shards(sharding, sum_over_ranks)


def _rank_check(
    source: Source, world: World, config: RunConfig, shards: Shards | None
) -> RankCheck:
    sharding = config.data.iterable_sharding
    return RankCheck.of(world, source.dataset, sharding, shares_out=shards is not None)
