"""The tokens each expert was sent, as a run has recorded them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

from drivetrain.record.reading import Event

EVENT = "expert_load"
MOST_RECORDED = 4096
"""Numbers in one record: of a model with more experts, those of the most uneven layers."""


def busiest(tokens: Sequence[int]) -> float:
    """What the busiest expert of a layer got, as a multiple of its share; 1 is even."""
    return max(tokens) * len(tokens) / (sum(tokens) or 1)


def recorded(layers: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
    """What is written down of them, the most uneven first; at least one."""
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
    """One layer's load, as it is shown."""

    name: str
    bars: str
    """A character per expert, or per some of them, the highest of which shows."""
    busiest: float
    """Times its share."""
    expert: int
    num_idle: int


_BARS = "▁▂▃▄▅▆▇█"


def shape_of(name: str, tokens: Sequence[int], most_bars: int = 64) -> LayerShape:
    """Bars that are full at the busiest expert."""
    per_bar = -(-len(tokens) // max(1, most_bars))
    highest = [max(tokens[start : start + per_bar]) for start in range(0, len(tokens), per_bar)]
    top = max(highest) or 1
    bars = "".join(_BARS[round(each / top * (len(_BARS) - 1))] for each in highest)
    at = max(range(len(tokens)), key=tokens.__getitem__)
    return LayerShape(name, bars, busiest(tokens), at, list(tokens).count(0))


@dataclass(frozen=True)
class LoadRecord:
    """What was sent to the experts between two records."""

    step: int
    layers: Mapping[str, Sequence[int]]
    """By layer: tokens of each expert."""
    num_chosen: int = 1
    """Experts that a token goes to."""


def load_records(events: Iterable[Event]) -> list[LoadRecord]:
    """Those among rank 0's events; what is none is passed over."""
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
