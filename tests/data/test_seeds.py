"""Seeds: what is drawn inside changes nothing outside."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from drivetrain.data import seeding
from drivetrain.data.keys import DATA, SAMPLER, fold, turn_seed
from drivetrain.data.seeding import seed_data, seed_model, undisturbed


def drawn() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))  # noqa: S311


def test_a_seed_sets_every_stream_of_the_process() -> None:
    seed_data(7)
    first = drawn()
    drawn()
    seed_data(7)
    assert drawn() == first
    seed_data(8)
    assert all(one != other for one, other in zip(drawn(), first, strict=True))
    seed_data(1 << 40 | 7)
    assert drawn()[1] == first[1], "NumPy takes 32 bits"


def test_what_is_drawn_inside_changes_nothing_outside_even_if_it_fails() -> None:
    seed_data(7)
    expected = drawn()
    seed_data(7)
    with pytest.raises(ValueError, match="x"), undisturbed():
        drawn()
        raise ValueError("x")
    assert drawn() == expected


def test_a_models_seed_is_the_devices_too(monkeypatch: pytest.MonkeyPatch) -> None:
    seeded: list[Any] = []
    monkeypatch.setattr(
        seeding,
        "accelerator_of",
        lambda device: SimpleNamespace(seed=lambda seed: seeded.append((device, seed))),
    )
    seed_model(5, torch.device("meta"))
    assert seeded == [(torch.device("meta"), 5)]
    first = drawn()
    seed_model(5, torch.device("cpu"))
    assert len(seeded) == 1
    assert drawn() == first


def test_seeds_of_turns_are_apart() -> None:
    stream = fold(42, DATA)
    seeds = {turn_seed(stream, step, index) for step in range(20) for index in range(-1, 20)}
    assert len(seeds) == 20 * 21
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    assert fold() == 0
    assert SAMPLER == 4
