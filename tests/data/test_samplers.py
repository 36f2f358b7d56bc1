"""The user's own samplers: drawn under a seed, counted, refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from drivetrain.core.errors import ConfigError
from drivetrain.data.digest import chained, digest_of
from drivetrain.data.keys import SAMPLER, fold
from drivetrain.data.samplers import UserSampler
from tests.data.parts import Order


def test_a_sampler_is_drawn_under_a_seed_of_its_epoch() -> None:
    class Draws(Order):
        def __iter__(self) -> Iterator[int]:
            return iter(torch.randperm(3).tolist())

    sampler = UserSampler.of(Draws(0, 1, 2), yields_batches=False)
    before = torch.get_rng_state()
    found = sampler.draw(5, 2)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(fold(5, SAMPLER, 2))
    assert found.items == torch.randperm(3).tolist()
    assert (found.epoch, found.num_ids) == (2, 3)
    assert sampler.sampler.epochs == [2]
    assert found.digest == digest_of(list(found.items))[0]


def test_ids_are_plain_and_batches_lists_of_them() -> None:
    ids = UserSampler.of(Order(torch.tensor(1), np.int64(2), "key"), yields_batches=False)
    assert ids.draw(0, 0).items == [1, 2, "key"]
    inner = Order(1)
    outer = Order((torch.tensor(1), 2), [3])
    outer.sampler = inner  # type: ignore[attr-defined]
    whole = UserSampler.of(outer, yields_batches=True).draw(0, 4)
    assert whole.items == [[1, 2], [3]]
    assert whole.num_ids == 3
    assert (outer.epochs, inner.epochs) == ([4], [4]), "the one inside is told, too"
    assert UserSampler(None, yields_batches=True, length=2).largest(whole) == 2


def test_ids_that_cannot_be_told_apart_are_counted() -> None:
    things = UserSampler.of(Order(object(), object()), yields_batches=False)
    assert things.draw(0, 0).digest == chained(0, 2)


@pytest.mark.parametrize(
    ("sampler", "yields_batches", "text"),
    [
        (
            iter([1]),
            False,
            "does not say how long an epoch is; give it a __len__: the number of ids it yields",
        ),
        (
            Order(),
            True,
            "does not say how long an epoch is; give it a __len__: the number of batches it yields",
        ),
    ],
)
def test_a_sampler_without_a_length_is_refused(
    sampler: Any, yields_batches: bool, text: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        UserSampler.of(sampler, yields_batches=yields_batches)
    assert str(caught.value) == f"DataLoader sampler = {type(sampler).__name__}: {text}"


@pytest.mark.parametrize(("yields_batches", "what"), [(False, "ids"), (True, "batches")])
def test_a_length_that_is_not_true_is_refused(yields_batches: bool, what: str) -> None:
    sampler = UserSampler.of(Order([1], [2], length=3), yields_batches=yields_batches)
    with pytest.raises(ConfigError) as caught:
        sampler.draw(0, 5)
    assert str(caught.value) == (
        f"DataLoader sampler = Order: yields 2 {what} in epoch 5, but its len() is 3; make len() "
        "equal what it yields, in every epoch"
    )


def test_a_sampler_that_draws_from_elsewhere_or_fails_is_named() -> None:
    class Moody(Order):
        def __iter__(self) -> Iterator[int]:
            self.ids[0] += 1
            return iter(self.ids)

    with pytest.raises(ConfigError) as caught:
        UserSampler.of(Moody(1, 2), yields_batches=False).check_repeatable(0)
    assert str(caught.value) == (
        "DataLoader sampler = Moody: draws random numbers that do not follow the run's seed: drawn "
        "twice, an epoch has different ids, so other ranks and a resumed run cannot reproduce "
        "them; leave out its generator=, or draw from torch's, Python's or NumPy's global "
        "generators, or from one that is seeded in __iter__ by set_epoch(epoch)"
    )

    class Broken(Order):
        def __iter__(self) -> Iterator[int]:
            raise ValueError("no")

    with pytest.raises(ValueError, match="^no") as broken:
        UserSampler.of(Broken(1), yields_batches=False).draw(0, 3)
    assert broken.value.__notes__ == ["raised by Broken.__iter__ (sampler), in epoch 3,"]
    steady = UserSampler.of(Order(1, 2), yields_batches=False)
    assert steady.check_repeatable(0).epoch == 0
