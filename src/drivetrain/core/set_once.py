"""YAML loaders for files that a person writes: a key that is set twice is an error.

PyYAML keeps the last value without a word. Files that Drivetrain wrote need no such check, and the
commands that read many of them use the plain loader.
"""

from __future__ import annotations

from typing import Any

import yaml
from yaml.composer import Composer
from yaml.nodes import MappingNode, ScalarNode

REMEDY = "remove one of the two"


class SetTwice(yaml.YAMLError):
    """A key is in a mapping twice; the message names it and both lines."""


class _SetOnce(Composer):
    """Checks each mapping as it is written, before `<<` merges others into it."""

    def compose_mapping_node(self, anchor: Any) -> MappingNode:
        node = super().compose_mapping_node(anchor)
        line_of: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            line = key.start_mark.line + 1
            if key.value in line_of:
                raise SetTwice(_said(key.value, line_of[key.value], line))
            line_of[key.value] = line
        return node


def _said(key: str, first: int, second: int) -> str:
    if first == second:
        return f"{key} is set twice on line {first}"
    return f"{key} is set on line {first} and on line {second}"


class SafeLoader(_SetOnce, yaml.SafeLoader):
    """Safe YAML in which every key is set once."""


class TextLoader(_SetOnce, yaml.BaseLoader):
    """The same, with all values as text."""
