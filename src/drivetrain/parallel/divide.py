"""What tp, pp and cp do to a model's own modules, before copies or shards are made of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

from drivetrain.config.schema import Parallel
from drivetrain.core.errors import ConfigError
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
    """Share layers, sequences and depth, in place; the pipeline's cut, if there is one."""
    if world.mesh is None:
        return None
    layout = world.layout
    cut = None
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
    return cut
