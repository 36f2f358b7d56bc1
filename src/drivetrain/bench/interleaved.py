"""Blocks of all arms in every round, in an order drawn anew, the same on every rank."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator


def interleaved(arms: Iterable[str], num_rounds: int) -> Iterator[str]:
    """The arms' names, one block each, round after round."""
    shuffle = random.Random(0)  # noqa: S311 - the same order on every rank
    for _ in range(num_rounds):
        order = list(arms)
        shuffle.shuffle(order)
        yield from order
