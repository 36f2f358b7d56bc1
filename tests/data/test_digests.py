"""Digests and fingerprints: what was read, told by its content."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from drivetrain.config.schema import Data
from drivetrain.data import digest as digest_module
from drivetrain.data.digest import MOST_SHOWN, Mark, Read, ReadDigest, _lighter, chained, digest_of
from drivetrain.data.fingerprint import content
from drivetrain.data.reading import Collated, in_order, read, read_one
from drivetrain.data.sources import source_from
from tests.data.parts import Numbers, given


def test_a_sample_is_told_by_its_type_its_form_and_its_content() -> None:
    assert given(5) == ([b"int", b"5"], True)
    assert given("a") == ([b"str", b"'a'"], True)
    assert given(b"xy") == ([b"bytes", b"xy"], True)
    assert given(bytearray(b"xy")) == ([b"bytearray", b"xy"], True)
    assert given(None) == ([b"NoneType"], True)
    assert given([1, None]) == ([b"list", b"int", b"1", b"NoneType"], True)
    assert given({"a": 1.5}) == ([b"dict", b"str", b"'a'", b"float", b"1.5"], True)
    assert given((True, 1j)) == ([b"tuple", b"bool", b"True", b"complex", b"1j"], True)
    tensor = torch.tensor([1, 2], dtype=torch.uint8)
    assert given(tensor) == ([b"Tensor", b"(torch.uint8, (2,))", b"\x01\x02"], True)
    array = np.array([1, 2], dtype=np.uint8)
    assert given(array) == ([b"ndarray", b"((2,), 2)", b"\x01\x02"], True)
    assert given(torch.ones(2).to_sparse()) == ([b"Tensor", b"(torch.float32, (2,))"], False)
    assert given(object()) == ([b"object"], False)
    assert given([object(), 5]) == ([b"list", b"object", b"int", b"5"], False)


def test_digests_are_those_of_every_release() -> None:
    """A checkpoint keeps them: a run that resumes with another release compares with them."""
    assert digest_of(5) == (1374679708948949129, True)
    assert digest_of({"x": torch.arange(3), "y": "text"}) == (6456329077650229566, True)
    assert chained(0, 1, 2) == 5349425249354526337
    assert chained(7, -1) == 252433776866159876
    assert _read_all(range(70)).after == Mark(70, 348496497394214018)


def _read_all(samples: Any, mark: Mark | None = None) -> Read:
    followed = ReadDigest(mark or Mark())
    list(followed.follow(iter(samples)))
    return followed.take()


def test_large_samples_are_hashed_at_even_distances(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest_module, "_HASHED_BYTES", 8)
    small, large = torch.arange(8, dtype=torch.uint8), torch.arange(9, dtype=torch.uint8)
    assert _lighter(small) is small
    shape, some = _lighter(large.view(3, 3))
    assert (tuple(shape), some.tolist()) == ((3, 3), [0, 2, 4, 6, 8])
    assert _lighter(torch.arange(4.0))[1].tolist() == [0.0, 2.0]
    assert _lighter(b"12345678") == b"12345678"
    assert _lighter(b"123456789") == [9, b"1234", b"6789"]
    assert _lighter({"a": large, "b": 1})["a"][1].tolist() == [0, 2, 4, 6, 8]
    assert _lighter((1, "x")) == [1, "x"]
    assert _lighter({3, 1}) == [1, 3]
    assert _lighter(SimpleNamespace(a=1)) == ["SimpleNamespace", {"a": 1}]
    sparse = torch.ones(20).to_sparse()
    assert _lighter(sparse) is sparse
    array = np.zeros(3)
    assert _lighter(array) is array
    empty = SimpleNamespace()
    assert _lighter(empty) is empty


def test_a_read_says_where_it_began_and_shows_its_first_samples() -> None:
    read = _read_all(range(20), Mark(3, 9))
    assert read.before == Mark(3, 9)
    assert read.after.position == 23
    assert read.shown == tuple(digest_of(n)[0] for n in range(MOST_SHOWN))
    assert MOST_SHOWN == 8
    assert (read.whole, read.is_known, read.worker) == (0, True, None)
    assert not read.is_end
    followed = ReadDigest(Mark())
    list(followed.follow(iter([object()])))
    first = followed.take(worker=2)
    assert (first.is_known, first.worker) == (False, 2)
    second = followed.take()
    assert (second.is_known, second.is_end) == (True, True)
    assert Read(Mark(), Mark()) == Read(Mark(0, 0), Mark(0, 0), (), 0, True, None)


@pytest.mark.parametrize(
    ("position", "is_linked"), [(255, True), (256, True), (257, False), (320, True), (321, False)]
)
def test_after_the_first_samples_every_64th_counts(position: int, is_linked: bool) -> None:
    one, other = (_read_all([sample], Mark(position, 1)).after for sample in (5, 6))
    assert (one.chain != other.chain) is is_linked
    assert (one.chain != 1) is is_linked


def test_a_whole_batch_is_chained_where_it_was_asked_for() -> None:
    followed = ReadDigest(Mark(257, 1))
    followed.hashes_all = True
    list(followed.follow(iter([5, 6])))
    read = followed.take()
    numbers = [digest_of(n)[0] for n in (5, 6)]
    assert read.whole == chained(chained(0, numbers[0]), numbers[1])
    assert read.shown == tuple(numbers)
    assert read.after == Mark(259, 1)


def test_a_fingerprint_is_of_the_content_and_of_nothing_else() -> None:
    one, other = [1, 2, 3], [1, 2, 4]
    first = content(source_from(one, Data()))
    assert first == content(source_from(list(one), Data()))
    assert first != content(source_from(other, Data()))
    assert first is not None
    assert len(first) == 16
    assert content(source_from(iter(one), Data())) is None
    single = content(source_from([7], Data()))
    assert single is not None


def test_an_error_of_a_sample_names_it() -> None:
    class Broken(Numbers):
        def __getitem__(self, index: int) -> int:
            if index == 3:
                raise ValueError("no")
            return index

    for call, who in (
        (lambda: read(Broken(), [1, 3, 5]), "Broken.__getitem__(3)"),
        (lambda: read_one(Broken(), 3), "Broken.__getitem__(3)"),
    ):
        with pytest.raises(ValueError, match="^no") as caught:
            call()
        assert caught.value.__notes__ == [f"raised by {who}"]
    assert read(Broken(), [1, 2]) == [1, 2]
    assert read_one(Broken(), 2) == 2


def test_a_dataset_that_reads_many_at_once_is_asked_for_many() -> None:
    class Many:
        def __getitems__(self, ids: Any) -> list[int]:
            if 9 in ids:
                raise ValueError("no")
            return [10 * i for i in ids]

    assert read(Many(), [1, 2]) == [10, 20]
    with pytest.raises(ValueError, match="^no") as caught:
        read(Many(), range(8, 10))
    assert caught.value.__notes__ == ["raised by Many.__getitems__([8, 9])"]


def test_errors_of_collating_and_of_a_stream_say_how_far_it_had_come() -> None:
    def pad(samples: list[Any]) -> Any:
        raise ValueError("no")

    with pytest.raises(ValueError, match="^no") as caught:
        Collated(pad)([1, 2])
    (note,) = caught.value.__notes__
    assert note.endswith(".pad (collate), given 2 samples,")

    class Pads:
        def __call__(self, samples: list[Any]) -> Any:
            raise ValueError("no")

    with pytest.raises(ValueError, match="^no") as caught:
        Collated(Pads())([])
    assert caught.value.__notes__ == ["raised by Pads (collate), given 0 samples,"]

    class Breaks(IterableDataset[Any]):
        def __iter__(self) -> Iterator[int]:
            yield from (1, 2)
            raise ValueError("no")

    with pytest.raises(ValueError, match="^no") as caught:
        list(in_order(Breaks()))
    assert caught.value.__notes__ == ["raised by Breaks.__iter__, after 2 samples"]
