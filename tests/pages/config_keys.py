"""docs/config-keys.md: every config key, from the schema."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from typing import Any, Literal, Union

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from drivetrain.config.schema import RunConfig

_TOP = """# Config keys

All config keys of a run, with their defaults and allowed values. `drivetrain config` prints them in
a terminal. [Config](config.md) explains how to pass a config and how errors are reported.
`make pages` generates this page from the schema that validates configs.
"""
_KINDS = {
    int: "whole number",
    float: "number",
    str: "text",
    bool: "true or false",
    type(None): "`null`",
}


def page() -> str:
    parts = [_TOP]
    for path, section in _sections(RunConfig, ""):
        title = f"`{path}`" if path else "The run"
        doc = "" if not path else " ".join((section.__doc__ or "").split())
        rows = [_row(path, name, field) for name, field in _own_keys(section)]
        if not rows:
            continue
        parts.append(f"## {title}\n")
        if doc:
            parts.append(f"{_escaped(doc)}\n")
        head = ["| key | default | values | description |", "| --- " * 4 + "|"]
        parts.append("\n".join([*head, *rows, ""]))
    return "\n".join(parts)


def _sections(model: type[BaseModel], path: str) -> Iterator[tuple[str, type[BaseModel]]]:
    yield path, model
    for name, field in model.model_fields.items():
        section = _section(field)
        if section is not None:
            yield from _sections(section, f"{path}.{name}".strip("."))


def _section(field: FieldInfo) -> type[BaseModel] | None:
    kind: Any = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _own_keys(model: type[BaseModel]) -> list[tuple[str, FieldInfo]]:
    return [(name, f) for name, f in model.model_fields.items() if _section(f) is None]


def _row(path: str, name: str, field: FieldInfo) -> str:
    key = f"{path}.{name}".strip(".")
    default = "required" if field.is_required() else f"`{_value(field.default)}`"
    may_be = ", ".join([*_kinds(field.annotation), *_bounds(field)])
    what = _escaped(" ".join((field.description or "").split()))
    return f"| `{key}` | {default} | {may_be} | {what} |"


def _value(default: object) -> str:
    if default is None:
        return "null"
    if isinstance(default, tuple):
        return "[" + ", ".join(str(each) for each in default) + "]"
    return str(default).lower() if isinstance(default, bool) else str(default)


def _kinds(annotation: Any) -> list[str]:
    """Return the allowed values in words: `auto`, whole number."""
    origin, inside = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return [f"`{each}`" for each in inside]
    if origin in (Union, types.UnionType):
        return [kind for each in inside for kind in _kinds(each)]
    if origin in (tuple, list):
        return ["a list of " + " or ".join(_kinds(inside[0]))]
    if origin is dict:
        return ["a mapping"]
    return [_KINDS.get(annotation, "text")]


def _bounds(field: FieldInfo) -> list[str]:
    words = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
    bounds = [
        (word, getattr(rule, name))
        for rule in field.metadata
        for name, word in words.items()
        if getattr(rule, name, None) is not None
    ]
    return [f"{word} {bound:g}" for word, bound in bounds if bound < 2**53]


def _escaped(text: str) -> str:
    """Escape text for a table; inside backticks only the bar needs it."""
    pieces = text.replace("|", "\\|").split("`")
    pieces[::2] = [each.replace("<", "&lt;").replace("*", "\\*") for each in pieces[::2]]
    return "`".join(pieces)
