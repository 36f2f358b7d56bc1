"""Search: estimate and rank every possible layout × strategy × micro-batch × recomputation.

Pruned before any estimate: sizes that do not divide, tp across nodes, stages without blocks, model
states that alone exceed a device. Offload is considered only if nothing else fits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Literal

from drivetrain.cluster.description import Cluster
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.core.section import Section
from drivetrain.core.traits import STRATEGIES, all_traits, traits_of
from drivetrain.parallel.layout import Layout
from drivetrain.plan.candidate import Candidate
from drivetrain.plan.cost.estimate import Estimate, estimate, memory_limit
from drivetrain.plan.profile.model import PrecisionName, Recompute
from drivetrain.plan.profile.profiling import Profiler
from drivetrain.strategies.cost import cost_model

Objective = Literal["fastest", "cheapest", "fewest"]
_AS_GOOD = 0.01
_NEAREST = 60


def proposed(*, needs_packages: bool = True) -> tuple[str, ...]:
    """Return the strategies considered by default, or those of them that need only torch."""
    return tuple(
        each.name
        for each in all_traits()
        if each.is_proposed and (needs_packages or not each.packages)
    )


@dataclass(frozen=True)
class Question:
    """What to plan for, and the choices that the search may make."""

    global_batch_size: int
    objective: Objective = "fastest"
    precisions: tuple[PrecisionName, ...] = ("bf16",)
    strategies: tuple[str, ...] = field(default_factory=proposed)
    recomputes: tuple[Recompute, ...] = ("none", "selective", "full")
    micro_batch_size: int | None = None
    """Consider only this size."""
    configs_micro_batch_size: int | Literal["auto"] = "auto"
    """What the config sets; the plan says so if it has another size."""
    max_cp: int = 1
    max_pp: int = 64
    steps: int | None = None
    """Steps of the whole run, for its time and cost."""
    deadline_s: float | None = None
    budget: float | None = None


@dataclass(frozen=True)
class Answer:
    """All estimates that fit, best first, and those that do not."""

    fitting: tuple[Estimate, ...]
    too_large: tuple[Estimate, ...]
    """In ascending order of memory."""
    num_considered: int


def search(profiler: Profiler, cluster: Cluster, question: Question) -> Answer:
    """Estimate and rank all candidates."""
    fitting: list[Estimate] = []
    too_large: list[Estimate] = []
    considered = 0
    for world_size in _world_sizes(cluster, question.objective):
        found = [
            _priced(profiler, candidate, cluster)
            for candidate in _candidates(profiler, cluster, question, world_size)
        ]
        if not any(priced.fits for priced in found):
            found += [
                _priced(profiler, candidate, cluster)
                for candidate in _candidates(profiler, cluster, question, world_size, "cpu")
            ]
        if not found:  # not even model states fit: report the nearest misses
            nearest = islice(
                _candidates(profiler, cluster, question, world_size, limit=math.inf), _NEAREST
            )
            found = [_priced(profiler, candidate, cluster) for candidate in nearest]
        considered += len(found)
        fitting += [priced for priced in found if priced.fits and _in_time(priced, question)]
        too_large += [priced for priced in found if not priced.fits]
        if fitting and question.objective == "fewest":
            break
    if not considered:
        raise ConfigError([_nothing(cluster, question)])
    fitting.sort(key=lambda priced: _rank(priced, question.objective))
    fitting = _simplest_first(fitting, question.objective)
    too_large.sort(key=lambda priced: priced.memory.total)
    return Answer(tuple(fitting), tuple(too_large), considered)


def _priced(profiler: Profiler, candidate: Candidate, cluster: Cluster) -> Estimate:
    """Estimate a candidate; if it does not fit, try the strategy's leaner options.

    These are never faster, so they are tried only when memory requires it.
    """
    plain = estimate(profiler, candidate, cluster)
    options = candidate.cost.leaner(candidate.use)
    if plain.fits or options is None:
        return plain
    leaner = estimate(profiler, replace(candidate, options=options), cluster)
    return leaner if leaner.memory.total < plain.memory.total else plain


def _simplest_first(ranked: list[Estimate], objective: Objective) -> list[Estimate]:
    """Move the simplest of the near-best to the front: predictions are less exact than that."""
    if not ranked or objective == "fewest":
        return ranked
    limit = _rank(ranked[0], objective)[0] * (1 + _AS_GOOD)
    close = [each for each in ranked if _rank(each, objective)[0] <= limit]
    first = min(close, key=lambda each: _complexity(each.candidate))
    return [first, *(each for each in ranked if each is not first)]


def _rank(priced: Estimate, objective: Objective) -> tuple[float, ...]:
    """Return the sort key; smaller is better. Plans equal to three digits rank by simplicity."""
    seconds = priced.time.total / priced.candidate.global_batch_size
    spent = priced.price_per_step
    devices = priced.candidate.layout.world_size
    paid = spent if spent is not None else seconds * devices
    simple = _complexity(priced.candidate)
    if objective == "cheapest":
        return (_rounded(paid), simple, seconds)
    if objective == "fewest":
        return (devices, _rounded(seconds), simple)
    return (_rounded(seconds), simple, paid)


def _rounded(value: float) -> float:
    return float(f"{value:.2e}")


def _complexity(candidate: Candidate) -> float:
    axes = sum(size > 1 for size in (*candidate.layout.sizes, candidate.layout.ep))
    trades = {"none": 0.0, "selective": 0.2, "full": 0.3}
    offload = 1.0 if candidate.offload != "none" else 0.0
    own = candidate.cost.complexity(candidate.use)
    return axes + own + trades[candidate.recompute] + offload


def _in_time(priced: Estimate, question: Question) -> bool:
    if question.steps is None:
        return True
    if question.deadline_s is not None and priced.time.total * question.steps > question.deadline_s:
        return False
    spent = (priced.price_per_step or 0.0) * question.steps
    return question.budget is None or spent <= question.budget


def _world_sizes(cluster: Cluster, objective: Objective) -> list[int]:
    """Return all devices; for `cheapest` and `fewest` also smaller parts, smallest first."""
    if objective == "fastest":
        return [cluster.num_devices]
    sizes = {n for n in _powers(cluster.devices_per_node) if n <= cluster.devices_per_node}
    sizes |= {n * cluster.devices_per_node for n in _powers(cluster.num_nodes)}
    return sorted(sizes | {cluster.num_devices})


def _powers(most: int) -> list[int]:
    return [2**k for k in range(most.bit_length()) if 2**k <= most]


def _candidates(
    profiler: Profiler,
    cluster: Cluster,
    question: Question,
    world_size: int,
    offload: Literal["none", "cpu"] = "none",
    *,
    limit: float | None = None,
) -> Iterator[Candidate]:
    limit = memory_limit(cluster) if limit is None else limit
    for layout, strategy, options in _spreads(profiler, cluster, question, world_size):
        per_rank, rest = divmod(question.global_batch_size, layout.dp)
        if rest or not per_rank:
            continue
        for precision in question.precisions:
            spread = Candidate(
                layout, strategy, precision=precision, options=options, offload=offload
            )
            can_offload = offload == "none" or spread.cost.can_offload(spread.use)
            if layout.ep > 1 and (precision == "fp16" or offload != "none"):
                continue  # not implemented
            if not can_offload or _least_state(profiler, spread) > limit:
                continue
            for size in _micro_batches(per_rank, layout, question):
                for recompute in question.recomputes:
                    if recompute != "none" and not profiler.shape.num_blocks:
                        continue
                    yield replace(
                        spread,
                        micro_batch_size=size,
                        accumulation=per_rank // size,
                        recompute=recompute,
                    )


def _spreads(
    profiler: Profiler, cluster: Cluster, question: Question, world_size: int
) -> Iterator[tuple[Layout, str, Section]]:
    blocks = profiler.shape.num_blocks
    for tp in profiler.tp_sizes:
        if tp > cluster.devices_per_node or world_size % tp:
            continue
        for cp in _powers(question.max_cp):
            for pp in _divisors(world_size // tp):
                fits = pp == 1 or (
                    profiler.shape.can_be_staged and pp <= min(blocks, question.max_pp)
                )
                if not fits or (pp > 1 and cp > 1) or world_size % (tp * cp * pp):
                    continue
                dp = world_size // (tp * cp * pp)
                for layout, name, options in _data_parallel(question, cluster, pp, cp, tp, dp):
                    for ep in _expert_ranks(profiler, layout, name):
                        yield replace(layout, ep=ep), name, options


def _data_parallel(
    question: Question, cluster: Cluster, pp: int, cp: int, tp: int, dp: int
) -> Iterator[tuple[Layout, str, Section]]:
    sizes = _shard_sizes(cluster, dp, tp, cp)
    for name in (name for name in STRATEGIES.names if name in question.strategies):
        is_divided = tp * pp * cp > 1
        ways = cost_model(name).variants(dp, cp, is_divided=is_divided, shard_sizes=sizes)
        for way in ways:
            yield Layout(pp, way.dp_replicate, way.dp_shard, cp, tp), name, way.options


def _expert_ranks(profiler: Profiler, layout: Layout, strategy: str) -> Iterator[int]:
    """Yield the possible values of `parallel.ep`; it does not combine with cp."""
    yield 1
    if "ep" in traits_of(strategy).combines_with and layout.cp == 1:
        yield from (n for n in profiler.ep_sizes if n > 1 and layout.dp_shard % n == 0)


def _shard_sizes(cluster: Cluster, dp: int, tp: int, cp: int) -> list[int]:
    """Return the shard sizes to try: all ranks, or those of one node or of a few nodes."""
    node = max(1, cluster.devices_per_node // (tp * cp))
    wanted = {dp, *(node * k for k in (1, 2, 4, 8, 16, 32))}
    return sorted(shard for shard in wanted if shard * cp > 1 and shard <= dp and dp % shard == 0)


def _micro_batches(per_rank: int, layout: Layout, question: Question) -> list[int]:
    sizes = [n for n in _powers(min(per_rank, 64)) if per_rank % n == 0]
    if per_rank <= 256 and per_rank not in sizes:
        sizes.append(per_rank)
    if question.micro_batch_size is not None:
        sizes = [n for n in (question.micro_batch_size,) if per_rank % n == 0]
    # a pipeline with fewer micro-batches than stages is mostly bubble, and 1f1b refuses it
    return [n for n in sizes if layout.pp == 1 or per_rank // n >= layout.pp]


def _divisors(number: int) -> list[int]:
    return (
        [n for n in range(1, number + 1) if number % n == 0] if number <= 4096 else _powers(number)
    )


def _least_state(profiler: Profiler, candidate: Candidate) -> float:
    """Return the lower bound of weights, gradients and optimizer state per rank."""
    profile = profiler.profile(candidate.way)
    tp, layout = candidate.layout.tp, candidate.layout
    weights, trained, state = (
        profile.total(what, tp) / layout.pp for what in ("parameters", "trained", "optimizer")
    )
    return candidate.cost.least_state(weights, trained, state, candidate.use)


def _nothing(cluster: Cluster, question: Question) -> Problem:
    return Problem(
        "global_batch_size",
        f"no layout of {cluster.num_devices} devices divides it",
        "use a multiple of the number of devices, or more devices",
        question.global_batch_size,
    )
