"""Two checkpoints beside each other."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from drivetrain.checkpoint import compare as compare_module
from drivetrain.checkpoint.compare import Difference, _larger, _numbers, _shown, _values, compare
from tests.checkpoint.parts import written


def test_two_checkpoints_are_compared_tensor_by_tensor(tmp_path: Path) -> None:
    ours = {
        "model.same": torch.ones(2),
        "model.numbers": torch.tensor([1.0, 2.0, 3.0]),
        "model.shape": torch.ones(2, 3),
        "model.dtype": torch.ones(2),
        "model.here": torch.ones(1),
    }
    theirs = {
        "model.same": torch.ones(2),
        "model.numbers": torch.tensor([1.0, 2.5, 2.0]),
        "model.shape": torch.ones(3, 2),
        "model.dtype": torch.ones(2, dtype=torch.float64),
        "model.there": torch.ones(4, dtype=torch.int64),
    }
    here = written(tmp_path / "here", ours, values={"lr": 0.1})
    there = written(tmp_path / "there", theirs, values={"lr": 0.2})
    found = compare(here, there)
    assert found.differences == (
        Difference("values.lr", "value", "0.1", "0.2"),
        Difference("model.numbers", "numbers", "2 of 3 numbers", "", 1.0),
        Difference("model.shape", "shape", "float32[2, 3]", "float32[3, 2]"),
        Difference("model.dtype", "dtype", "float32[2]", "float64[2]"),
        Difference("model.here", "only here", "float32[1]", "absent"),
        Difference("model.there", "only there", "absent", "int64[4]"),
    )
    assert found.num_identical == 1
    assert not found.is_same
    same = compare(here, here)
    assert same.is_same
    assert same.num_identical == 5


def test_numbers_are_compared_in_parts_to_their_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare_module, "_AT_ONCE", 2)
    ours, theirs = torch.zeros(5), torch.tensor([0.0, -3.0, 0.0, 0.0, 2.0])
    assert list(_numbers("a", ours, theirs)) == [
        Difference("a", "numbers", "2 of 5 numbers", "", 3.0)
    ]
    assert list(_numbers("a", ours, ours)) == []


def test_what_is_no_number_and_the_sign_of_zero_are_told_by_their_bits() -> None:
    nan, zero = torch.tensor([math.nan, 1.0]), torch.tensor([0.0])
    assert list(_numbers("a", nan, nan.clone())) == []
    (minus,) = _numbers("a", zero, -zero)
    assert (minus.here, minus.max_abs) == ("1 of 1 numbers", 0.0)
    (lost,) = _numbers("a", nan, torch.tensor([0.0, 9.0]))
    assert lost.max_abs is not None
    assert math.isnan(lost.max_abs), "the largest difference there is"
    (apart,) = _numbers("a", torch.tensor([3j]), torch.tensor([4.0 + 0j]))
    assert apart.max_abs == 5.0


def test_the_larger_difference_wins_and_none_changes_nothing() -> None:
    assert _larger(2.0, torch.tensor([])) == 2.0
    assert _larger(2.0, torch.tensor([1.0, 2.0])) == 2.0
    assert _larger(2.0, torch.tensor([1.0, 3.0])) == 3.0
    assert math.isnan(_larger(2.0, torch.tensor([math.nan])))


def test_values_are_compared_leaf_by_leaf_and_long_lists_as_one() -> None:
    ours = {"a": {"b": [1, {"c": 2}]}, "few": [0] * 32, "many": [0] * 33, "t": torch.ones(3)}
    theirs = {"a": {"b": [1, {"c": 3}]}, "few": [0] * 31 + [1], "many": [0] * 32 + [1], "t": 1}
    found = {each.name: (each.here, each.there) for each in _values(ours, theirs)}
    assert found == {
        "a.b.1.c": ("2", "3"),
        "few.31": ("0", "1"),
        "many": (
            "[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, ...",
            "[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, ...",
        ),
        "t": ("a tensor of 3", "1"),
    }
    assert [each.name for each in _values([1], [1, 2], "x")] == ["x"]
    assert list(_values({"t": torch.ones(1000)}, {"t": torch.ones(1000)})) == []


def test_a_value_is_shown_in_at_most_forty_letters() -> None:
    assert _shown("x" * 40) == "x" * 40
    assert _shown("x" * 41) == "x" * 37 + "..."
    assert _shown(torch.ones(1000)) == "a tensor of 1,000"
