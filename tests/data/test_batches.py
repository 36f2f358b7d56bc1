"""Batches: who reads which samples, and what they look like on the way to a device."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from drivetrain.core.errors import ConfigError
from drivetrain.data.batches import BatchPlan, DataPosition, MicroBatch, share
from drivetrain.data.device import to_device
from drivetrain.data.ready_batches import first_sample, num_samples_in


def test_a_batch_plan_begins_at_the_beginning() -> None:
    assert DataPosition() == (0, 0, 0)
    plan = BatchPlan(8, 2, 3, 20)
    assert plan.start == DataPosition(0, 0, 0)
    assert (plan.num_micro_batches, plan.accumulation, plan.steps_per_epoch) == (4, 2, 3)
    assert plan.blocks() == [range(2), range(2, 4), range(4, 4)]
    assert plan.num_idle_turns == 2


def test_parts_differ_by_at_most_one_and_the_first_are_the_larger() -> None:
    assert [share(7, 3, index) for index in range(3)] == [(0, 3), (3, 5), (5, 7)]
    assert [share(1, 3, index) for index in range(3)] == [(0, 1), (1, 1), (1, 1)]


def test_a_global_batch_is_cut_into_turns_of_every_rank() -> None:
    plan = BatchPlan(4, 2, 3, 10)
    assert plan.micro_batches(1, 0) == [MicroBatch(1, 0, 4, 6, 4, 0)]
    assert plan.micro_batches(1, 1) == [MicroBatch(1, 1, 6, 8, 4, 0)]
    assert plan.micro_batches(1, 2) == [MicroBatch(1, -1, 4, 4, 4, 0)]
    short = BatchPlan(8, 2, 2, 9)
    assert short.micro_batches(1, 0) == [
        MicroBatch(1, 0, 8, 9, 1, 0),
        MicroBatch(1, 1, 8, 8, 1, 0),
    ]
    assert short.micro_batches(2, 1)[0].epoch == 1
    assert short.stop_of(short.micro_batches(1, 0)[1]) == 9, "no more than the batch has"


class Pair(NamedTuple):
    x: Any
    y: Any


class Moves:
    """Something of the user's that moves itself."""

    def __init__(self) -> None:
        self.asked: Any = None

    def to(self, device: torch.device, *, non_blocking: bool) -> str:
        self.asked = (device, non_blocking)
        return "moved"


def test_every_container_keeps_its_form_on_the_way_to_a_device() -> None:
    meta, tensor, own = torch.device("meta"), torch.ones(2), Moves()
    moved = to_device(
        {"a": (tensor, 1), "b": [tensor], "c": Pair(tensor, "x"), "d": own, "e": None}, meta
    )
    assert [type(moved[key]) for key in "abc"] == [tuple, list, Pair]
    assert moved["a"][0].is_meta
    assert moved["a"][1] == 1
    assert moved["b"][0].is_meta
    assert moved["c"].x.is_meta
    assert moved["c"].y == "x"
    assert (moved["d"], moved["e"]) == ("moved", None)
    assert own.asked == (meta, True), "steps need not wait for it"
    assert not tensor.is_meta


def test_a_sample_out_of_a_batch_has_its_form() -> None:
    tensor = torch.arange(4).view(2, 2)
    assert first_sample(tensor).tolist() == [0, 1]
    found = first_sample({"x": tensor, "y": ["a", "b"], "z": (tensor, [1, 2])})
    assert found["x"].tolist() == [0, 1]
    assert found["y"] == "a"
    assert isinstance(found["z"], tuple)
    assert found["z"][1] == 1
    pair = first_sample(Pair(tensor, tensor))
    assert isinstance(pair, Pair)
    assert pair.y.tolist() == [0, 1]


def test_the_size_of_a_batch_is_that_of_the_first_thing_that_has_one() -> None:
    assert num_samples_in({"a": torch.tensor(1), "b": torch.ones(3, 2)}) == 3
    assert num_samples_in(["x", "y"]) == 2
    assert num_samples_in([]) == 0
    assert num_samples_in([["x", "y", "z"], torch.ones(2)]) == 3
    with pytest.raises(ConfigError) as caught:
        num_samples_in({"a": 5})
    assert str(caught.value) == (
        "data.batched = True: a batch of type dict contains nothing whose first dimension counts "
        "samples; let the stream yield tensors, arrays or lists in dicts, lists or tuples"
    )
