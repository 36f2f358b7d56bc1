"""Which parts of the model each pipeline stage has: as the pipeline itself would cut it."""

from __future__ import annotations

from functools import lru_cache

from drivetrain.parallel.pipeline.split import balanced_stages
from drivetrain.plan.profile.model import ModelProfile


def stage_parts(profile: ModelProfile, num_stages: int) -> list[tuple[int, ...]]:
    """Per stage: traced parts in the order they are run."""
    positions = profile.shape.positions()
    if num_stages == 1:
        return [tuple(positions)]
    weights = tuple(round(part.sizes.num_parameters.one(1)) for part in profile.parts)
    costs = tuple(weights[position] for position in positions)
    stages = []
    for index, blocks in enumerate(_cut(costs, num_stages)):
        parts = [positions[1 + block] for block in blocks]
        if index == 0:
            parts.insert(0, positions[0])
        if index == num_stages - 1:
            parts.append(positions[-1])
        stages.append(tuple(parts))
    return stages


@lru_cache(maxsize=512)
def _cut(costs: tuple[int, ...], num_stages: int) -> tuple[range, ...]:
    """`costs` of front, blocks, back."""
    return tuple(balanced_stages(costs[1:-1], (costs[0], costs[-1]), num_stages))
