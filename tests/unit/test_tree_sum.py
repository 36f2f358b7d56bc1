from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from drivetrain.strategies.bitwise import Span, TreeAccumulator, pieces_of, tree_sum

floats = st.lists(
    st.floats(-1e6, 1e6, allow_nan=False).filter(lambda x: x != 0), min_size=1, max_size=40
)


def pieces_by(values: list[float], start: int, stop: int) -> list[tuple[Span, float]]:
    tree: TreeAccumulator[float] = TreeAccumulator()
    for index in range(start, stop):
        tree.add(index, values[index])
    return tree.take()


@given(floats, st.data())
def test_the_sum_has_the_same_bits_however_it_is_cut(
    values: list[float], data: st.DataObject
) -> None:
    n = len(values)
    alone = tree_sum(dict(pieces_by(values, 0, n)), 0, n)
    inner = data.draw(st.lists(st.integers(0, n), max_size=6))
    cuts = [0, *sorted(inner), n]
    pieces: dict[Span, float] = {}
    for start, stop in itertools.pairwise(cuts):
        pieces |= dict(pieces_by(values, start, stop))
    assert tree_sum(pieces, 0, n) == alone


@given(st.integers(0, 64), st.integers(0, 64))
def test_pieces_are_known_without_the_values(start: int, length: int) -> None:
    values = [1.0] * (start + length)
    spans = [span for span, _ in pieces_by(values, start, start + length)]
    assert spans == pieces_of(start, start + length)


def test_even_power_of_two_blocks_need_one_piece_each() -> None:
    assert [len(pieces_of(r * 4, r * 4 + 4)) for r in range(4)] == [1, 1, 1, 1]


def test_the_order_is_the_trees_and_not_left_to_right() -> None:
    values = [1e16, 1.0, 1.0, -1e16]
    assert tree_sum(dict(pieces_by(values, 0, 4)), 0, 4) == (1e16 + 1.0) + (1.0 - 1e16)
