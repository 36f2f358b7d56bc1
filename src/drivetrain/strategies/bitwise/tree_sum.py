"""Adding n things up in one fixed order, whoever holds which of them.

Floating-point addition is not associative, so a sum's bits depend on its order. Here the order is
a balanced binary tree over indices 0 … n - 1, and a holder of neighbouring indices can add up whole
subtrees alone: the pieces it ends with are nodes of the tree, wherever the cuts lie.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, Protocol, Self, TypeVar

Span = tuple[int, int]
"""Half-open: (2, 4) covers indices 2 and 3."""


class _Addable(Protocol):
    def __add__(self, other: Self, /) -> Self: ...


T = TypeVar("T", bound=_Addable)


class TreeAccumulator(Generic[T]):
    """Takes indices in ascending order; merges two neighbours once they are one node's halves."""

    def __init__(self) -> None:
        self._pieces: list[tuple[Span, T]] = []

    def add(self, index: int, value: T) -> None:
        """Add the leaf at `index`."""
        span = (index, index + 1)
        while self._pieces and _are_halves(self._pieces[-1][0], span):
            left_span, left = self._pieces.pop()
            value = left + value
            span = (left_span[0], span[1])
        self._pieces.append((span, value))

    def take(self) -> list[tuple[Span, T]]:
        """The pieces, in order; the accumulator is empty afterwards."""
        pieces, self._pieces = self._pieces, []
        return pieces


def _are_halves(left: Span, right: Span) -> bool:
    size = left[1] - left[0]
    return size == right[1] - right[0] and left[1] == right[0] and left[0] % (2 * size) == 0


def pieces_of(start: int, stop: int) -> list[Span]:
    """The pieces a holder of start … stop - 1 ends with."""
    spans: list[Span] = []
    for index in range(start, stop):
        span = (index, index + 1)
        while spans and _are_halves(spans[-1], span):
            span = (spans.pop()[0], span[1])
        spans.append(span)
    return spans


def tree_sum(pieces: Mapping[Span, T], start: int, stop: int) -> T:
    """The sum over start … stop - 1, in tree order, from pieces that are nodes of the tree."""
    if (start, stop) in pieces:
        return pieces[start, stop]
    half = 1 << ((stop - start - 1).bit_length() - 1)
    return tree_sum(pieces, start, start + half) + tree_sum(pieces, start + half, stop)
