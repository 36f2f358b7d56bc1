"""A model's experts at the start of a run: a note about them, and counting their tokens."""

from __future__ import annotations

from torch import nn

from drivetrain.config.schema import RunConfig
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.parallel.expert.finding import find_experts
from drivetrain.parallel.expert.load import ExpertLoad, balancer
from drivetrain.parallel.several_models import ModelsByName
from drivetrain.parallel.world import World
from drivetrain.train.engine import Engine


def expert_load(
    model: nn.Module, world: World, config: RunConfig, notes: list[str]
) -> ExpertLoad | None:
    """Return a counter of each expert's tokens, or None if there is nothing to count."""
    experts = find_experts(model, config.parallel.expert.modules)
    is_balanced = any(balancer(model, each) is not None for each in experts)
    if isinstance(model, ModelsByName):
        if is_balanced:
            rule = "routers balanced by load are not supported with several models"
            raise ConfigError([Problem("balance", rule, "train one model", has_value=False)])
        return None
    # counting breaks a compiled graph: done there only for routers balanced by load
    if not experts or (config.compile.enabled and not is_balanced):
        return None
    ep, counts = world.layout.ep, sorted({each.count for each in experts})
    each = f", {'/'.join(str(count // ep) for count in counts)} on a rank" if ep > 1 else ""
    notes.append(
        f"experts: {'/'.join(map(str, counts))} in each of {len(experts)} layers{each}; a balance "
        "loss in the model covers one micro-batch's tokens, the recorded load those of all ranks"
    )
    return ExpertLoad(model, experts, world)


def count_load(engine: Engine, load: ExpertLoad | None, config: RunConfig) -> None:
    """Let the engine count the experts' load; does nothing without experts."""
    if load is None:
        return
    load.leave_to_others(engine.spread.inner)
    if load.is_balanced and (engine.spread.local_steps or config.fault_tolerance == "live"):
        rule = "ranks that step on their own do not know the other ranks' expert load"
        remedy = "use another parallel.strategy, or fault_tolerance=restart"
        raise ConfigError([Problem("balance", rule, remedy, has_value=False)])
    engine.expert_load = load
