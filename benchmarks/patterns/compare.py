"""What two curves of losses have to do with each other. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Curve:
    """What a run printed: the loss of every step, and what it found at the end."""

    losses: Sequence[float]
    metrics: Mapping[str, float] = field(default_factory=dict)


def distance(one: Curve, other: Curve) -> float:
    """The largest relative difference of any loss or metric; ValueError for other steps."""
    if len(one.losses) != len(other.losses) or one.metrics.keys() != other.metrics.keys():
        raise ValueError(
            f"{len(one.losses)} steps and {sorted(one.metrics)} beside "
            f"{len(other.losses)} steps and {sorted(other.metrics)}"
        )
    pairs = [
        *zip(one.losses, other.losses, strict=True),
        *((value, other.metrics[name]) for name, value in one.metrics.items()),
    ]
    return max(abs(a - b) / max(abs(a), abs(b), 1e-30) for a, b in pairs)


def is_rest_of(resumed: Curve, whole: Curve) -> bool:
    """Whether all that a resumed run did is what the whole one did, to the last bit."""
    rest = list(whole.losses)[-len(resumed.losses) :]
    return list(resumed.losses) == rest and dict(resumed.metrics) == dict(whole.metrics)
