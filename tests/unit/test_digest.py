"""Digests of samples, and the chain that follows a stream."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from drivetrain.core.errors import ConfigError
from drivetrain.data.digest import Mark, ReadDigest, digest_of
from drivetrain.data.ready_batches import check_sizes, first_sample, num_samples_in

LARGE = torch.arange(100_000)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.tensor(1), torch.tensor(2)),
        (torch.tensor(1), torch.tensor(1.0)),
        (LARGE, LARGE + 1),
        (LARGE, LARGE[:-1]),
        (b"x" * 100_000, b"x" * 99_999 + b"y"),
        ({"a": 1}, {"a": 2}),
        ((1, "x"), (1, "y")),
        ({1, 2}, {1, 3}),
        (np.zeros(2), np.ones(2)),
        (SimpleNamespace(x=1), SimpleNamespace(x=2)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_other_samples_have_other_digests(one: Any, other: Any) -> None:
    (first, is_known), (second, _) = digest_of(one), digest_of(other)
    assert is_known
    assert first != second
    assert digest_of(one)[0] == first


def test_what_cannot_be_told_apart_is_said_to_be() -> None:
    assert not digest_of(object())[1]
    assert not digest_of({"a": [object()]})[1]
    assert digest_of({"a": [None]})[1]


def _chain(samples: list[int], *sizes: int) -> list[Mark]:
    digest = ReadDigest(Mark())
    stream = digest.follow(iter(samples))
    marks = []
    for size in sizes:
        list(itertools.islice(stream, size))
        marks.append(digest.take().after)
    return marks


def test_a_chain_depends_on_samples_and_not_on_batches() -> None:
    samples = list(range(300))
    assert _chain(samples, 10, 20, 30)[-1] == _chain(samples, 60)[-1]
    assert _chain(samples, 60) != _chain([1, 0, *samples[2:]], 60)
    assert _chain(samples, 299) == _chain([*samples[:290], -1, *samples[291:]], 299), (
        "after the first ones, only some are hashed"
    )
    assert _chain(samples, 260) != _chain([*samples[:256], -1, *samples[257:]], 260)


def test_a_chain_goes_on_from_a_mark() -> None:
    samples = list(range(100))
    digest = ReadDigest(_chain(samples, 40)[0])
    list(digest.follow(iter(samples[40:])))
    read = digest.take()
    assert read.after == _chain(samples, 100)[0]
    assert read.before.position == 40
    assert not read.is_end
    assert digest.take().is_end


def test_a_whole_batch_is_hashed_when_it_is_asked_for() -> None:
    reads = []
    for samples in ([7] * 300, [7] * 299 + [8]):
        digest = ReadDigest(Mark(500, 3))
        digest.hashes_all = True
        list(digest.follow(iter(samples)))
        reads.append(digest.take())
    assert reads[0].after == reads[1].after
    assert reads[0].whole != reads[1].whole


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (torch.zeros(3, 2), 3),
        ({"x": torch.zeros(4), "y": ["a", "b", "c", "d"]}, 4),
        ((torch.zeros(2, 5), torch.zeros(2)), 2),
        ({"texts": ["a", "b"]}, 2),
        ([torch.tensor(0), np.zeros((5, 1))], 5),
    ],
)
def test_samples_in_a_ready_batch(batch: Any, size: int) -> None:
    assert num_samples_in(batch) == size
    first_sample(batch if size != 5 else batch[1:])


def test_a_batch_without_samples_is_refused() -> None:
    with pytest.raises(ConfigError, match="contains nothing whose first dimension counts samples"):
        num_samples_in({"x": torch.tensor(1)})


def test_sizes_of_ready_batches() -> None:
    check_sizes([2, 4], 4, is_first=True)
    check_sizes([2, 2], 4, is_first=False)
    for sizes, is_first in (([2, 2], True), ([8], False)):
        with pytest.raises(ConfigError, match=f"set micro_batch_size={sizes[0]}"):
            check_sizes(sizes, 4, is_first=is_first)
