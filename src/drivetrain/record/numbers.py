"""Which names in a run's directory are numbers of ranks and attempts, and which values are sane."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from drivetrain.core.errors import DamagedRun

_RANK = re.compile(r"[0-9]{1,8}")
_LAST_ATTEMPT = 2**16 - 2
"""A record of a step has two bytes for it."""
LATEST_S = 1e11
"""No moment of a run is later, in seconds since the epoch."""
LAST_STEP = 2**53


def rank_of(name: str) -> int | None:
    """The rank a file is named after; None for other names."""
    return int(name) if _RANK.fullmatch(name) else None


def attempt_of(name: str) -> int | None:
    """The attempt a folder is named after; None for other names."""
    number = rank_of(name)
    return number if number is not None and number < _LAST_ATTEMPT else None


def check_numbers(
    where: str, facts: Mapping[str, Any], moments: Iterable[str], counts: Iterable[str]
) -> None:
    """DamagedRun unless what should be a time or a count is one, or is not given."""
    for name in moments:
        if facts.get(name) is not None and not is_within(facts[name], LATEST_S):
            raise DamagedRun(f"{where}: {name} is {_shown(facts[name])}, not a time")
    for name in counts:
        value = facts.get(name)
        if value is not None and not (is_within(value, LAST_STEP) and value == int(value)):
            raise DamagedRun(f"{where}: {name} is {_shown(value)}, not a number of anything")


def is_within(value: Any, most: float) -> bool:
    """A number from 0 to `most`."""
    return type(value) in (int, float) and math.isfinite(value) and 0 <= value <= most


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 40 else f"{text[:37]}..."
