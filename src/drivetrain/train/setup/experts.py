"""A model's experts, as a run starts: what is said of them, and who counts their tokens."""

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
    """Of a model with experts, counted where they are called; or None."""
    experts = find_experts(model, config.parallel.expert.modules)
    is_balanced = any(balancer(model, each) is not None for each in experts)
    if isinstance(model, ModelsByName):
        if is_balanced:
            rule = "several models are trained without routers that go by the load"
            raise ConfigError([Problem("balance", rule, "train one model", has_value=False)])
        return None
    # counting breaks a compiled graph: it is done there only for routers that go by it
    if not experts or (config.compile.enabled and not is_balanced):
        return None
    ep, counts = world.layout.ep, sorted({each.count for each in experts})
    each = f", {'/'.join(str(count // ep) for count in counts)} on a rank" if ep > 1 else ""
    notes.append(
        f"experts: {'/'.join(map(str, counts))} in each of {len(experts)} layers{each}; a balance "
        "loss of the model's own is over each micro-batch's tokens, the load is over all ranks'"
    )
    return ExpertLoad(model, experts, world)


def count_load(engine: Engine, load: ExpertLoad | None, config: RunConfig) -> None:
    """Once the engine is there; nothing without experts."""
    if load is None:
        return
    load.leave_to_others(engine.spread.inner)
    if load.is_balanced and (engine.spread.local_steps or config.fault_tolerance == "live"):
        rule = "ranks that step alone do not know what others have sent to the experts"
        remedy = "use another parallel.strategy, or fault_tolerance=restart"
        raise ConfigError([Problem("balance", rule, remedy, has_value=False)])
    engine.expert_load = load
