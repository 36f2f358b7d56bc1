"""Which hosts meet when: every pair once, and no host twice in a round (the circle method)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

Member = TypeVar("Member")

# Up to so many rounds, all pairs of 64 hosts; of more hosts each still meets 63 others.
MOST_ROUNDS = 63


def rounds(members: Sequence[Member], most: int = MOST_ROUNDS) -> list[list[tuple[Member, Member]]]:
    """Disjoint pairs, round by round; an odd member sits out."""
    circle: list[Member | None] = [*members, *([None] if len(members) % 2 else [])]
    found = []
    for _ in range(min(most, max(0, len(circle) - 1))):
        half = len(circle) // 2
        facing = zip(circle[:half], reversed(circle[half:]), strict=True)
        found.append([(a, b) for a, b in facing if a is not None and b is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return found
