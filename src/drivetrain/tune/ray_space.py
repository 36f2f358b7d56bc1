"""Converts Ray Tune's domains to the form of the YAML. Does not import Ray."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_REFUSED = {
    "Normal": "tune.randn is unbounded; use tune.uniform",
    "Function": "tune.sample_from is a function whose values no sampler knows",
    "grid_search": "tune.grid_search tries every value; use tune.choice",
}


def from_ray(said: Any) -> Any:
    """{low: …, high: …} or a list of values; anything that is not Ray's is returned unchanged."""
    if isinstance(said, Mapping) and said.keys() == {"grid_search"}:
        raise ValueError(_REFUSED["grid_search"])
    kind = type(said)
    if kind.__module__.partition(".")[0] != "ray":
        return said
    if kind.__name__ == "Categorical":
        return list(said.categories)
    if kind.__name__ not in ("Float", "Integer"):
        raise ValueError(
            _REFUSED.get(kind.__name__, f"is Ray's {kind.__name__}, which is not supported")
        )
    return _range(said, is_whole=kind.__name__ == "Integer")


def _range(said: Any, *, is_whole: bool) -> dict[str, Any]:
    sampler, quantum = said.sampler, None
    if hasattr(sampler, "q"):
        sampler, quantum = sampler.sampler, sampler.q
    name = type(sampler).__name__.removeprefix("_")
    if name not in ("Uniform", "LogUniform"):
        raise ValueError(_REFUSED.get(name, f"is sampled by Ray's {name}, which is not supported"))
    if name == "LogUniform" and quantum not in (None, 1):
        raise ValueError("a logarithmic range cannot have steps; leave out the q of tune.qlog…")
    found = {"low": said.lower, "high": said.upper, "log": name == "LogUniform"}
    if is_whole and quantum in (None, 1):
        found["high"] = said.upper - 1  # Ray's upper end is exclusive
    elif quantum is not None:  # multiples of it within the ends
        found["low"] = _inwards(said.lower, quantum, math.ceil)
        found["high"] = _inwards(said.upper, quantum, math.floor)
        found["step"] = quantum
    return {**found, "type": "int" if is_whole else "float"}


def _inwards(end: float, quantum: float, rounded: Any) -> Any:
    """Round an end inwards to a multiple; as in Ray, the last bits do not matter."""
    times = end / quantum
    nearest = round(times)
    return (nearest if math.isclose(times, nearest) else rounded(times)) * quantum
