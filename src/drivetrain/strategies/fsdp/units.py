"""Select the modules that are sharded separately; the rest is sharded with the root."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from drivetrain.core.errors import ConfigError, Problem
from drivetrain.parallel.blocks import blocks_named, repeated_blocks

_KEY = "parallel.fsdp.shard_modules"


def units(model: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """Return the named modules, or the repeated blocks without those that share weights.

    A weight shared by two units would become two weights. Blocks that share one stay with the root,
    where it remains one weight; if they are named, ConfigError.
    """
    found = blocks_named(model, names, _KEY) if names else repeated_blocks(model)
    shared = _sharing(model, found)
    if names and shared:
        raise ConfigError([_refused(place, other) for place, other in shared.values()])
    return [unit for unit in found if unit not in shared]


def notes_of(model: nn.Module, names: Sequence[str]) -> list[str]:
    """Return what users should know about the automatic selection."""
    if names:
        return []
    found = repeated_blocks(model)
    if not found:
        return ["fsdp: no repeated blocks found, so the model is sharded as one piece"]
    shared = list(_sharing(model, found).values())
    if not shared:
        return []
    place, other = shared[0]
    some = "1 block shares" if len(shared) == 1 else f"{len(shared)} blocks share"
    return [
        f"fsdp: {some} weights with other parts of the model ({place} with {other}): sharded "
        "with the root, whose weights stay gathered for the whole step"
    ]


def _refused(place: str, other: str) -> Problem:
    rule = f"{place} shares a weight with {other}: sharded separately, it would become two weights"
    return Problem(_KEY, rule, "leave both out: the root shards them together", has_value=False)


def _sharing(model: nn.Module, found: Sequence[nn.Module]) -> dict[nn.Module, tuple[str, str]]:
    """Return units that share a weight: the unit's name, and the name of the other module."""
    places = {module: place for place, module in model.named_modules()}
    units_found = set(found)
    users: dict[nn.Parameter, dict[nn.Module, str]] = {}

    def visit(module: nn.Module, unit: nn.Module, place: str) -> None:
        unit = module if module in units_found else unit
        for weight in module.parameters(recurse=False):
            users.setdefault(weight, {}).setdefault(unit, place)
        for name, child in module.named_children():
            visit(child, unit, f"{place}.{name}" if place else name)

    visit(model, model, "")
    shared: dict[nn.Module, tuple[str, str]] = {}
    for owners in users.values():
        for unit in owners:
            others = [place for other, place in owners.items() if other is not unit]
            if others and unit is not model:
                shared.setdefault(unit, (places[unit], others[0] or "the model itself"))
    return shared
