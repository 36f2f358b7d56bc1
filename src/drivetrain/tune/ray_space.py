"""Ray Tune's domains, said as the YAML says them. Ray is not imported: whoever has one has it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_REFUSED = {
    "Normal": "tune.randn has no ends; take tune.uniform",
    "Function": "tune.sample_from is a function, of which no sampler knows the values",
    "grid_search": "tune.grid_search tries every value; take tune.choice",
}


def from_ray(said: Any) -> Any:
    """{low: …, high: …} or a list of values; what is not Ray's is given back as it is."""
    if isinstance(said, Mapping) and said.keys() == {"grid_search"}:
        raise ValueError(_REFUSED["grid_search"])
    kind = type(said)
    if kind.__module__.partition(".")[0] != "ray":
        return said
    if kind.__name__ == "Categorical":
        return list(said.categories)
    if kind.__name__ not in ("Float", "Integer"):
        raise ValueError(_REFUSED.get(kind.__name__, f"is of Ray's kind {kind.__name__}"))
    return _range(said, is_whole=kind.__name__ == "Integer")


def _range(said: Any, *, is_whole: bool) -> dict[str, Any]:
    sampler, quantum = said.sampler, None
    if hasattr(sampler, "q"):
        sampler, quantum = sampler.sampler, sampler.q
    name = type(sampler).__name__.removeprefix("_")
    if name not in ("Uniform", "LogUniform"):
        raise ValueError(_REFUSED.get(name, f"is drawn by Ray's {name}"))
    if name == "LogUniform" and quantum not in (None, 1):
        raise ValueError("a logarithmic range has no steps; leave the q of tune.qlog… out")
    found = {"low": said.lower, "high": said.upper, "log": name == "LogUniform"}
    if is_whole and quantum in (None, 1):
        found["high"] = said.upper - 1  # Ray's own does not belong to it
    elif quantum is not None:  # multiples of it, from within the ends
        found["low"] = _inwards(said.lower, quantum, math.ceil)
        found["high"] = _inwards(said.upper, quantum, math.floor)
        found["step"] = quantum
    return {**found, "type": "int" if is_whole else "float"}


def _inwards(end: float, quantum: float, rounded: Any) -> Any:
    """As Ray does: an end that is a multiple but for its last bits is one."""
    times = end / quantum
    nearest = round(times)
    return (nearest if math.isclose(times, nearest) else rounded(times)) * quantum
