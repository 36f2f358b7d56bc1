"""Frozen weights, and what fits into a model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drivetrain.checkpoint import fitting, frozen
from drivetrain.checkpoint.fitting import check_same_model, check_shapes
from drivetrain.checkpoint.frozen import FrozenBase, check_base, fingerprints
from drivetrain.core.errors import ConfigError


def test_weights_that_only_one_side_has_are_named_at_most_three() -> None:
    own = {f"model.{letter}" for letter in "abcd"}
    check_same_model("step-4", own, {*own, "optimizer.a.step"})
    with pytest.raises(ConfigError) as caught:
        check_same_model("step-4", own, {"model.x", "model.y", "model.z"})
    remedy = "resume with the model that was saved, or start a new run"
    assert str(caught.value).splitlines() == [
        f"model: checkpoint step-4 has no a, b, c …; {remedy}",
        f"model: this model lacks weights that checkpoint step-4 has: x, y, z; {remedy}",
    ]


def test_weights_of_other_shapes_are_named_at_most_five() -> None:
    entries = {f"model.{n}": SimpleNamespace(size=torch.Size([2])) for n in range(7)}

    class Reader:
        def read_metadata(self) -> Any:
            return None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fitting, "described", lambda _, name: entries[name])
        reader: Any = Reader()
        check_shapes("step-4", {"model.0": torch.ones(2)}, reader)
        with pytest.raises(ConfigError) as caught:
            check_shapes("step-4", {name: torch.ones(3) for name in entries}, reader)
    lines = str(caught.value).splitlines()
    assert len(lines) == 5
    assert lines[0] == (
        "0 = (3,): checkpoint step-4 has shape (2,); resume with the model that was saved, or "
        "start a new run"
    )


def alone(values: list[float]) -> list[float]:
    return values


def test_fingerprints_are_those_of_every_release() -> None:
    """A checkpoint keeps them: another release must come to the same."""
    tensors = {
        "vector": torch.arange(4.0),
        "matrix": torch.arange(6, dtype=torch.int16).view(2, 3),
        "number": torch.tensor(7, dtype=torch.int64),
        "bytes": torch.tensor([[[1]], [[2]]], dtype=torch.uint8),
        "complex": torch.tensor([1 + 2j]),
        "none": torch.ones(0, 3),
    }
    assert fingerprints(tensors, alone) == {
        "vector": "003e441d1a400000",
        "matrix": "75582a6bab7b3585",
        "number": "2304fe9a3c70db8b",
        "bytes": "aba5bf7d7e06f3c7",
        "complex": "35bef7873c800000",
        "none": "0000000000000000",
    }
    assert fingerprints({}, alone) == {}


def test_a_fingerprint_is_of_every_number_and_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.arange(12.0).view(3, 4)
    changed = tensor.clone()
    changed[2, 3] = 0.5
    prints = fingerprints(
        {
            "a": tensor,
            "turned": tensor.flip(0),
            "other way": tensor.flip(1),
            "reshaped": tensor.view(4, 3),
            "changed": changed,
        },
        alone,
    )
    assert len(set(prints.values())) == 5
    monkeypatch.setattr(frozen, "_AT_ONCE", 5)
    assert fingerprints({"a": tensor}, alone)["a"] == prints["a"], "in parts as at once"


def test_copies_of_a_tensor_on_other_ranks_do_not_change_its_fingerprint() -> None:
    tensor = {"a": torch.arange(5.0), "none": torch.ones(0)}
    assert fingerprints(tensor, lambda values: [3 * v for v in values]) == fingerprints(
        tensor, alone
    )


def test_a_base_knows_what_has_moved_on_any_rank() -> None:
    tensors = {"a": torch.ones(3), "b": torch.ones(3), "c": torch.ones(0)}
    base = FrozenBase(tensors, alone)
    assert base.unchanged() == {"a", "b", "c"}
    tensors["b"].data.mul_(2)  # which torch does not count
    assert base.unchanged() == {"a", "c"}
    tensors["a"].add_(0)  # which it does, though no value has changed
    assert base.unchanged() == {"c"}
    elsewhere = FrozenBase({"a": torch.ones(3)}, lambda values: [v + 1 for v in values])
    assert elsewhere.unchanged() == set()
    assert FrozenBase({}, alone).unchanged() == set()


def test_a_bases_fingerprints_are_computed_once() -> None:
    summed: list[int] = []

    def sums(values: list[float]) -> list[float]:
        summed.append(len(values))
        return values

    tensors = {"a": torch.ones(3), "b": torch.ones(3)}
    base = FrozenBase(tensors, sums)
    assert base.fingerprints(["a"]) == {"a": fingerprints({"a": tensors["a"]}, alone)["a"]}
    assert set(base.fingerprints(["a", "b"])) == {"a", "b"}
    assert set(base.fingerprints(["b"])) == {"b"}
    assert summed == [3, 3]


def test_a_base_that_differs_is_named_with_how_many_more() -> None:
    own = {f"model.{letter}": torch.ones(2) for letter in "abc"}
    saved = fingerprints(own, alone)
    check_base("step-4", saved, own, alone)
    check_base("step-4", {**saved, "model.gone": "0"}, own, alone)
    with pytest.raises(ConfigError) as caught:
        check_base("step-4", dict.fromkeys(own, "0"), own, alone)
    assert str(caught.value) == (
        "a: is frozen and differs from the base weights of step-4 (so do 2 more), which holds "
        "trained weights only (checkpoint.contents); build the model from the same base weights, "
        "or start a new run"
    )
    with pytest.raises(
        ConfigError, match=r"^b: is frozen and differs from the base weights of step-4, which"
    ):
        check_base("step-4", {**saved, "model.b": "0"}, own, alone)
