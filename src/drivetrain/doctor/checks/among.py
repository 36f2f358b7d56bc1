"""What most hosts have, and who differs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TypeVar

Value = TypeVar("Value")


def odd_ones(values: Mapping[str, Value]) -> tuple[Value, dict[str, Value]] | None:
    """The commonest value (of equals, the first) and the hosts with another; None if alike."""
    if len(set(values.values())) < 2:
        return None
    usual = Counter(values.values()).most_common(1)[0][0]
    return usual, {host: value for host, value in values.items() if value != usual}
