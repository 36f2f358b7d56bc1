"""Settings that a check of a script adds to its config, and which of the script's give way to them.

A check makes a short run, or one that saves nothing. Where the script's own settings fit the run
that it is for, but not that one, refusing them would refuse the check: they give way instead.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from drivetrain.config.provenance import Source

FORCED = "DRIVETRAIN_FORCED_KEYS"
"""Environment variable: the keys that a check has set, separated by commas."""

_MARK = "instead of "
_Values = Mapping[str, Any]


def forced_by(settings: Iterable[str]) -> dict[str, str]:
    """The environment of a run to which a check adds these `key=value` settings."""
    return {FORCED: ",".join(word.partition("=")[0] for word in settings)}


def give_way(said: Mapping[str, tuple[Any, Source]]) -> dict[str, tuple[Any, Source]]:
    """Change what cannot be combined with settings that a check has forced on this process."""
    forced = set(filter(None, os.environ.get(FORCED, "").split(",")))
    changed = dict(said)
    for key, needs, find in _GIVE_WAY:
        values = {name: value for name, (value, _) in changed.items()}
        if key in values and key not in forced and needs in forced:
            for value, why in find(values):
                changed[key] = (value, Source("chosen", why))
    return changed


def gave_way(sources: Mapping[str, str]) -> list[tuple[str, str]]:
    """The keys that gave way in a run, by the sources in its run.yaml, and why."""
    whys = ((key, sources.get(key, "").partition(f"chosen: {_MARK}")) for key, _, _ in _GIVE_WAY)
    return [(key, f"{_MARK}{why}") for key, (_, marked, why) in whys if marked]


def _nothing_is_saved(values: _Values) -> Iterator[tuple[Any, str]]:
    if values.get("checkpoint.every_steps") is None and values["checkpoint.keep_best"] is not None:
        yield None, f"{_MARK}{values['checkpoint.keep_best']}: this check saves nothing"


def _warmup_fits(values: _Values) -> Iterator[tuple[Any, str]]:
    steps = values["max_steps"]
    if _exceeds(values["optimization.warmup_steps"], steps):
        yield steps, _shorter(values, "optimization.warmup_steps")


def _decay_fits(values: _Values) -> Iterator[tuple[Any, str]]:
    warmup, steps = values.get("optimization.warmup_steps", 0), values["max_steps"]
    if not isinstance(warmup, int) or not isinstance(steps, int):
        return
    left = steps - warmup
    if _exceeds(values["optimization.decay_steps"], left):
        yield left or None, _shorter(values, "optimization.decay_steps")


def _exceeds(value: Any, most: Any) -> bool:
    return isinstance(value, int) and isinstance(most, int) and value > most


def _shorter(values: _Values, key: str) -> str:
    return f"{_MARK}{values[key]}: this check has {values['max_steps']} steps"


_Find = Callable[[_Values], Iterator[tuple[Any, str]]]
_GIVE_WAY: tuple[tuple[str, str, _Find], ...] = (
    ("checkpoint.keep_best", "checkpoint.every_steps", _nothing_is_saved),
    ("optimization.warmup_steps", "max_steps", _warmup_fits),
    ("optimization.decay_steps", "max_steps", _decay_fits),
)
"""Key, the forced key that it must fit, and the new value. The rules are in rules.py."""
