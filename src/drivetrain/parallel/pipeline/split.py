"""Which blocks make up which stage, and which rank has it. Pure arithmetic on names and costs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate, pairwise

from drivetrain.core.errors import ConfigError, Problem
from drivetrain.parallel.pipeline.anatomy import Anatomy

_KEY = "parallel.pipeline.split_points"


def stages_at(anatomy: Anatomy, points: Sequence[str], num_stages: int) -> list[range]:
    """Blocks of each stage, cut at named blocks."""
    unknown = [point for point in points if point not in anatomy.blocks[1:]]
    if unknown:
        known = ", ".join(anatomy.blocks[1:])
        raise ConfigError(
            [Problem(_KEY, "no block has this name", f"use {known}", p) for p in unknown]
        )
    if len(points) != num_stages - 1:
        rule = f"makes {len(points) + 1} stages, and the schedule needs {num_stages}"
        raise ConfigError([Problem(_KEY, rule, f"name {num_stages - 1} blocks", tuple(points))])
    starts = [0, *sorted(anatomy.blocks.index(point) for point in points), len(anatomy.blocks)]
    return [range(a, b) for a, b in pairwise(starts)]


def balanced_stages(costs: Sequence[float], ends: tuple[float, float], num: int) -> list[range]:
    """Contiguous blocks such that the dearest stage is as cheap as can be.

    `costs` are the blocks'; `ends` what the first and the last stage have on top.
    """
    count = len(costs)
    if num > count:
        rule = f"{num} stages need as many blocks, and the model has {count}"
        raise ConfigError([Problem("parallel.pp", rule, "use fewer ranks or stages", num)])

    before = [0.0, *accumulate(costs)]

    def cost(start: int, stop: int) -> float:
        extra = (ends[0] if start == 0 else 0.0) + (ends[1] if stop == count else 0.0)
        return before[stop] - before[start] + extra

    @cache
    def best(start: int, stages: int) -> tuple[float, tuple[int, ...]]:
        if stages == 1:
            return cost(start, count), (count,)
        return min(
            (max(cost(start, stop), rest), (stop, *stops))
            for stop in range(start + 1, count - stages + 2)
            for rest, stops in [best(stop, stages - 1)]
        )

    stops = best(0, num)[1]
    return [range(a, b) for a, b in pairwise((0, *stops))]


def stages_of_rank(rank: int, num_ranks: int, num_stages: int, *, is_v: bool) -> list[int]:
    """A loop deals stages round and round; a V turns at the last rank and comes back."""
    if not is_v:
        return list(range(rank, num_stages, num_ranks))
    return [rank, num_stages - 1 - rank]
