"""Which modules are sharded one by one; the root has the rest."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from drivetrain.core.errors import ConfigError, Problem
from drivetrain.parallel.blocks import blocks_named, repeated_blocks

_KEY = "parallel.fsdp.shard_modules"


def units(model: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """Those that are named, or the repeated blocks: without those that share weights.

    Weights that two units share would be two weights. What shares any stays with the root, where
    they are one; what was named is refused instead.
    """
    found = blocks_named(model, names, _KEY) if names else repeated_blocks(model)
    shared = _sharing(model, found)
    if names and shared:
        raise ConfigError([_refused(place, other) for place, other in shared.values()])
    return [unit for unit in found if unit not in shared]


def notes_of(model: nn.Module, names: Sequence[str]) -> list[str]:
    """What a user would not expect of them."""
    if names:
        return []
    found = repeated_blocks(model)
    if not found:
        return ["fsdp: no repeated blocks found, so the model is sharded as one piece"]
    shared = list(_sharing(model, found).values())
    if not shared:
        return []
    place, other = shared[0]
    some = "is 1 block that shares" if len(shared) == 1 else f"are {len(shared)} blocks that share"
    return [
        f"fsdp: there {some} weights with other parts of the model ({place} with {other}): sharded "
        "with the root, whose weights stay whole through the step"
    ]


def _refused(place: str, other: str) -> Problem:
    rule = f"{place} shares a weight with {other}: sharded apart, they would be two weights"
    return Problem(_KEY, rule, "leave both out: the root keeps them together", has_value=False)


def _sharing(model: nn.Module, found: Sequence[nn.Module]) -> dict[nn.Module, tuple[str, str]]:
    """Units of which a weight is used elsewhere, too: their place, and that of the other."""
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
