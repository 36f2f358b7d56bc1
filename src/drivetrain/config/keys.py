"""The dotted names of the config: which exist, and which one a typo was meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from drivetrain.config.schema import RunConfig


def walk_fields(
    model: type[BaseModel] = RunConfig, prefix: str = ""
) -> Iterator[tuple[str, FieldInfo]]:
    """Each leaf key with its field, in the order of the schema."""
    for name, field in model.model_fields.items():
        nested = field.annotation
        if isinstance(nested, type) and issubclass(nested, BaseModel):
            yield from walk_fields(nested, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


@cache
def leaf_keys() -> tuple[str, ...]:
    """Every dotted key of the config."""
    return tuple(path for path, _ in walk_fields())


def nearest_key(unknown: str) -> str | None:
    """The key that was probably meant: a right name in the wrong place, or a near spelling."""
    leaf = unknown.rpartition(".")[2]
    for path in leaf_keys():
        if path.rpartition(".")[2] == leaf:
            return path
    by_leaf = {path.rpartition(".")[2]: path for path in reversed(leaf_keys())}
    near = difflib.get_close_matches(unknown, leaf_keys(), n=1, cutoff=0.75)
    near_leaf = difflib.get_close_matches(leaf, by_leaf, n=1, cutoff=0.6)
    if near:
        return near[0]
    return by_leaf[near_leaf[0]] if near_leaf else None


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{'a': {'b': 1}} → {'a.b': 1}; a value that is itself a mapping stays one."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and f"{prefix}{key}" not in leaf_keys():
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    """{'a.b': 1} → {'a': {'b': 1}}."""
    nested: dict[str, Any] = {}
    for path, value in flat.items():
        *parents, leaf = path.split(".")
        node = nested
        for parent in parents:
            child = node.setdefault(parent, {})
            if not isinstance(child, dict):  # `a=1 a.b=2`: the section wins, the check reports it
                child = node[parent] = {}
            node = child
        node[leaf] = value
    return nested
