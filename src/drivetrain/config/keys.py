"""The dotted keys of the config, and suggestions for mistyped ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from drivetrain.config.schema import RunConfig
from drivetrain.core.hints import nearest

_OF_OTHER_TOOLS = {
    "batch_size": "global_batch_size",
    "train_batch_size": "global_batch_size",
    "epochs": "num_train_epochs",
    "lr": "optimization.learning_rate",
}


def walk_fields(
    model: type[BaseModel] = RunConfig, prefix: str = ""
) -> Iterator[tuple[str, FieldInfo]]:
    """Yield each leaf key with its field, in schema order."""
    for name, field in model.model_fields.items():
        nested = field.annotation
        if isinstance(nested, type) and issubclass(nested, BaseModel):
            yield from walk_fields(nested, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


@cache
def leaf_keys() -> tuple[str, ...]:
    """Return every dotted key of the config."""
    return tuple(path for path, _ in walk_fields())


def nearest_key(unknown: str) -> str | None:
    """Return the key that was probably meant: another tool's name, a wrong section, or a typo."""
    if translated := nearest(unknown, (), _OF_OTHER_TOOLS):
        return translated
    leaf = unknown.rpartition(".")[2]
    for path in leaf_keys():
        if path.rpartition(".")[2] == leaf:
            return path
    if translated := nearest(leaf, (), _OF_OTHER_TOOLS):
        return translated
    by_leaf = {path.rpartition(".")[2]: path for path in reversed(leaf_keys())}
    near = nearest(unknown, leaf_keys(), cutoff=0.75)
    near_leaf = nearest(leaf, by_leaf)
    return near or (by_leaf[near_leaf] if near_leaf else None)


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{'a': {'b': 1}} → {'a.b': 1}; a mapping that is a leaf key's value is kept."""
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
