"""The number of tokens sent to each expert, as recorded by a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

from drivetrain.record.reading import Event

EVENT = "expert_load"
MOST_RECORDED = 4096
"""Most numbers in one record; a model with more experts records its most uneven layers."""


def busiest(tokens: Sequence[int]) -> float:
    """Return the load of a layer's busiest expert as a multiple of its share; 1 is even."""
    return max(tokens) * len(tokens) / (sum(tokens) or 1)


def recorded(layers: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
    """Select the layers to record, the most uneven first; at least one."""
    uneven = sorted(
        (name for name in layers if sum(layers[name])), key=lambda n: -busiest(layers[n])
    )
    kept: dict[str, list[int]] = {}
    for name in uneven:
        if kept and sum(map(len, kept.values())) + len(layers[name]) > MOST_RECORDED:
            break
        kept[name] = list(layers[name])
    return kept


@dataclass(frozen=True)
class LayerShape:
    """One layer's load, for display."""

    name: str
    bars: str
    """A character per expert, or per group of experts, which shows the highest."""
    busiest: float
    """The busiest expert's load, as a multiple of its share."""
    expert: int
    num_idle: int


_BARS = "▁▂▃▄▅▆▇█"


def shape_of(name: str, tokens: Sequence[int], most_bars: int = 64) -> LayerShape:
    """Return a layer's bars, scaled to its busiest expert."""
    per_bar = -(-len(tokens) // max(1, most_bars))
    highest = [max(tokens[start : start + per_bar]) for start in range(0, len(tokens), per_bar)]
    top = max(highest) or 1
    bars = "".join(_BARS[round(each / top * (len(_BARS) - 1))] for each in highest)
    at = max(range(len(tokens)), key=tokens.__getitem__)
    return LayerShape(name, bars, busiest(tokens), at, list(tokens).count(0))


@dataclass(frozen=True)
class LoadRecord:
    """The tokens sent to the experts between two records."""

    step: int
    layers: Mapping[str, Sequence[int]]
    """Tokens of each expert, by layer."""
    num_chosen: int = 1
    """Number of experts each token is sent to."""


def load_records(events: Iterable[Event]) -> list[LoadRecord]:
    """Return the load records among rank 0's events; invalid ones are skipped."""
    found = []
    for event in events:
        tokens = event.values.get("tokens")
        if event.kind != "instant" or event.name != EVENT or not isinstance(tokens, Mapping):
            continue
        layers = {str(name): each for name, each in tokens.items() if _is_load(each)}
        if layers:
            chosen = event.values.get("chosen")
            found.append(LoadRecord(event.step, layers, chosen if _is_count(chosen) else 1))
    return found


def _is_load(tokens: object) -> bool:
    return (
        isinstance(tokens, list)
        and len(tokens) > 0
        and all(n == 0 or _is_count(n) for n in tokens)
        and sum(tokens) > 0
    )


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**63
