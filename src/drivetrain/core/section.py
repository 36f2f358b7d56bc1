"""Section: one frozen group of config keys."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator


class Section(BaseModel):
    """A frozen group of config keys that rejects unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    @field_validator("*", mode="before")
    @classmethod
    def _without_truth(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse true and false for a number: to Python they are 1 and 0, to a user a mistake."""
        if isinstance(value, bool | list | tuple | dict) and _is_number(cls, info.field_name):
            return _truth_as_text(value)
        return value


@cache
def _is_number(section: type[BaseModel], key: str) -> bool:
    """Whether a key's values are numbers, or are made of them, and are never true or false."""
    kinds = list(_kinds(section.model_fields[key].annotation))
    has_number = any(kind in (int, float) or type(kind) is int for kind in kinds)  # Literal[1, 2]
    return has_number and bool not in kinds


def _kinds(annotation: Any) -> Iterator[Any]:
    arms = get_args(annotation)
    for arm in arms:
        yield from _kinds(arm)
    if not arms:
        yield annotation


def _truth_as_text(value: Any) -> Any:
    """Write true and false as text, which every arm of a union refuses in its own words."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return {key: _truth_as_text(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_truth_as_text(each) for each in value]
    return value
