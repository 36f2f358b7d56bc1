"""Apply tp, pp, cp and ep to a model's modules, before it is replicated or sharded."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

from drivetrain.config.schema import Parallel
from drivetrain.core.errors import ConfigError
from drivetrain.parallel.expert.dispatch import spread_experts
from drivetrain.parallel.expert.finding import find_experts, refused_beside_pp, spread_problems
from drivetrain.parallel.pipeline import schedules
from drivetrain.parallel.pipeline.cut import Cut, cut_model
from drivetrain.parallel.world import World


def divide(
    model: nn.Module,
    config: Parallel,
    world: World,
    num_micro_batches: int,
    measure: Callable[[nn.Module], Mapping[str, float]],
) -> Cut | None:
    """Split layers, sequences, depth and experts, in place; return the pipeline's cut, if any."""
    if world.mesh is None:
        return None
    layout = world.layout
    cut = None
    experts = find_experts(model, config.expert.modules) if layout.ep > 1 else []
    if layout.ep > 1:
        problems = spread_problems(model, experts, layout.ep)
        problems += refused_beside_pp(model) if layout.pp > 1 else []
        if problems:
            raise ConfigError(problems[:5])
    if layout.tp > 1:
        from drivetrain.parallel.tensor import share_layers

        share_layers(model, config.tensor, world.mesh["tp"])
    if layout.pp > 1:
        problems = schedules.schedule_problems(config.pipeline, layout.pp, num_micro_batches)
        if problems:
            raise ConfigError(problems)
        costs = measure(model) if config.pipeline.balance == "time" else None
        where = layout.coordinates(world.rank)
        cut = cut_model(model, config.pipeline, where.pp, layout.pp, costs)
    if layout.cp > 1:
        from drivetrain.parallel.context import share_sequences

        share_sequences(model, world.mesh["cp"])
    if world.expert_mesh is not None:
        here = set(model.modules())  # the other experts are in other stages
        own = [each for each in experts if each.module in here]
        spread_experts(own, world.expert_mesh["ep"], config.expert.imbalance)
    return cut
