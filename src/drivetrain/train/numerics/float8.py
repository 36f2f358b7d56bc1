"""float8: linear layers that compute in 8 bits (torchao); weights keep their dtype."""

from __future__ import annotations

from fnmatch import fnmatchcase

from torch import nn

from drivetrain.config.schema import Precision
from drivetrain.core.errors import ConfigError, Problem
from drivetrain.core.requirements import require

_MULTIPLE = 16
"""Scaled matrix products on tensor cores need sides that are multiples of this."""


def use_float8(model: nn.Module, said: Precision) -> list[str]:
    """Convert the model's linear layers; return a note on which were converted."""
    if said.float8 == "none":
        return []
    linear = {n: m for n, m in model.named_modules() if n and isinstance(m, nn.Linear)}
    named = [n for n in linear if any(fnmatchcase(n, each) for each in said.float8_skip)]
    uneven = [
        name
        for name, layer in linear.items()
        if name not in named and (layer.in_features % _MULTIPLE or layer.out_features % _MULTIPLE)
    ]
    chosen = linear.keys() - {*named, *uneven}
    if not chosen:
        rule = f"none of the model's {len(linear)} linear layers can compute in 8 bits"
        remedy = f"use none; sides must be multiples of {_MULTIPLE} and not match float8_skip"
        raise ConfigError([Problem("precision.float8", rule, remedy, said.float8)])
    float8 = require("torchao.float8", extra="float8")
    float8.convert_to_float8_training(
        model,
        module_filter_fn=lambda _, name: name in chosen,
        config=float8.Float8LinearConfig.from_recipe_name(said.float8),
    )
    left = [
        f"{len(each)} {why}"
        for each, why in ((named, "skipped by name"), (uneven, "of unsuitable size"))
        if each
    ]
    besides = f"; not {' and '.join(left)}" if left else ""
    return [f"float8: {said.float8}, {len(chosen)} of {len(linear)} linear layers{besides}"]
