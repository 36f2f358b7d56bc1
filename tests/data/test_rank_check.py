"""What ranks tell each other of their data, and what is said when it differs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from drivetrain.core.errors import ConfigError
from drivetrain.data.digest import Mark, Read
from drivetrain.data.rank_check import RankCheck, _how_they_differ, _Standing, remedy_for, splits_by
from tests.data.parts import Ring, Stream


def standing(**changes: Any) -> _Standing:
    known: dict[str, Any] = {
        "dp_index": 1,
        "epoch": 2,
        "mark": Mark(3, 4),
        "is_end": False,
        "is_known": True,
        "shown": (5, 6),
    }
    return _Standing(**{**known, **changes})


def test_what_a_rank_tells_is_what_the_next_one_hears() -> None:
    for told in (standing(), standing(is_end=True, is_known=False, shown=tuple(range(8)))):
        numbers = told.numbers()
        assert len(numbers) == 16
        assert _Standing.of(numbers) == told
    assert standing().numbers() == [1, 2, 3, 4, 0, 1, 2, 0, 5, 6, 0, 0, 0, 0, 0, 0]
    assert standing().place == (2, Mark(3, 4), False)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"is_end": True, "mark": Mark(9, 4)},
            "rank 0's ended after 9 samples and rank 1's continues",
        ),
        (
            {"mark": Mark(9, 4)},
            "rank 1 has read 3 samples of epoch 2 and rank 0 9 of epoch 2",
        ),
        ({"epoch": 5}, "rank 1 has read 3 samples of epoch 2 and rank 0 3 of epoch 5"),
        ({"shown": (6, 5)}, "rank 1 reads the samples of rank 0 in a different order"),
        (
            {"shown": (7, 8)},
            "rank 1 reads different samples than rank 0: the dataset gives each rank its own part, "
            "or shuffles with its own random numbers",
        ),
    ],
)
def test_how_ranks_differ_is_said(changes: dict[str, Any], text: str) -> None:
    assert _how_they_differ(standing(), standing(**changes), "rank 1", "rank 0") == text


def test_who_has_ended_is_named_whoever_it_is() -> None:
    text = _how_they_differ(standing(is_end=True), standing(), "rank 1", "rank 0")
    assert text == "rank 1's ended after 3 samples and rank 0's continues"


def test_a_stream_that_differs_is_answered_with_what_to_do() -> None:
    assert splits_by(object()) == ""
    assert splits_by(SimpleNamespace(_distributed=object())) == "split_dataset_by_node"
    assert splits_by(SimpleNamespace(pipeline="split_by_node")) == ""
    assert remedy_for(SimpleNamespace(_distributed=object())) == (
        "it was split by split_dataset_by_node: pass it unsplit, or set "
        "data.iterable_sharding=already_sharded"
    )
    assert remedy_for(object()) == (
        "seed its shuffling the same way on every rank (by set_epoch(epoch), or from torch's, "
        "Python's and NumPy's global generators, which follow the run's seed); if it gives each "
        "rank its own part, set data.iterable_sharding=already_sharded"
    )


def check(ring: Any, *, rank: int = 1, shares_out: bool = False) -> RankCheck:
    return RankCheck(ring, rank, 1, Stream(1), "own_shard", shares_out)


def noted(checked: RankCheck, at: _Standing) -> None:
    before = at.mark if at.is_end else Mark()
    checked.note(at.epoch, at.mark, Read(before, at.mark, at.shown, is_known=at.is_known))


def test_one_rank_alone_tells_nobody() -> None:
    checked = check(None)
    noted(checked, standing())
    checked.settle()


def test_a_rank_tells_where_it_stands_and_a_stream_that_differs_is_refused() -> None:
    ring = Ring(standing())
    noted(check(ring), standing())
    assert ring.told == [standing().numbers()]
    with pytest.raises(ConfigError) as caught:
        noted(check(Ring(standing(mark=Mark(9, 9)))), standing())
    assert str(caught.value).startswith(
        "data = Stream: every rank must read the same stream, but rank 1 has read 3 samples of "
        "epoch 2 and rank 0 9 of epoch 2; seed its shuffling the same way on every rank"
    )


def test_a_part_of_its_own_may_differ_and_is_not_looked_at_after_the_first_steps() -> None:
    other = standing(dp_index=0, shown=(8, 9), mark=Mark(3, 7))
    noted(check(Ring(other), shares_out=True), standing())
    checked = check(Ring(other, other, standing(dp_index=0)), shares_out=True)
    for _ in range(3):
        noted(checked, standing())
    checked.settle()
    with pytest.raises(ConfigError, match="reads the same samples as rank 0"):
        noted(check(Ring(standing(dp_index=0)), shares_out=True), standing())


def test_an_end_is_settled_at_once() -> None:
    ring = Ring()
    checked = check(ring)
    heard = []
    for is_end in (False, False, False, True):
        noted(checked, standing(is_end=is_end))
        heard.append(ring.num_heard)
    assert heard == [1, 2, 2, 4]


def test_only_rank_0_speaks_of_what_it_cannot_tell_apart(recwarn: pytest.WarningsRecorder) -> None:
    noted(check(Ring(), rank=1), standing(is_known=False))
    assert len(recwarn) == 0
    noted(check(Ring(), rank=0), standing(is_known=False))
    assert [str(each.message) for each in recwarn] == [
        "the samples of Stream contain objects that cannot be hashed: ranks are checked only for "
        "reading the same number of samples; let the stream yield tensors, arrays, text and "
        "numbers in dicts, lists or tuples"
    ]
