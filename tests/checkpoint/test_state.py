"""Training state: what is kept, and what comes back."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.checkpoint.gathered import GatheredState
from drivetrain.checkpoint.state import (
    TrainingState,
    Value,
    _random_state,
    _restore_groups,
    _restore_random,
    is_own,
    own_name,
    pack,
    plain,
    saved_groups,
    unpack,
)
from drivetrain.core.errors import ConfigError
from drivetrain.parallel.accelerator import accelerator_of
from tests.checkpoint.parts import Small, Thing, trained


def test_a_state_is_named_by_the_models_own_names() -> None:
    model, optimizer = trained()
    average = torch.ones(2)
    state = TrainingState(model, optimizer, rank=3, averages={"ema.linear.bias": average})
    found, values = state.everything()
    assert set(found) == {
        *(f"model.{name}" for name in model.state_dict()),
        *(
            f"optimizer.linear.{name}.{key}"
            for name in ("weight", "bias")
            for key in ("step", "exp_avg", "exp_avg_sq")
        ),
        "ema.linear.bias",
        "rank.00003",
    }
    assert values["common"] == {}
    assert values["optimizer"]["groups"] == saved_groups(optimizer)
    assert set(unpack(found["rank.00003"])) == {"random"}
    assert set(state.load_targets()) == set(found) - {"rank.00003"}
    changes = state.changes_in_forward()
    assert {name for name in found if changes(name)} == {
        "model.frozen",
        "model.norm.running_mean",
        "model.norm.running_var",
        "model.norm.num_batches_tracked",
        "rank.00003",
    }


def test_of_copies_of_a_model_only_the_firsts_statistics_are_saved() -> None:
    model, _ = trained()
    names = set(TrainingState(model, None).weights())
    later = set(TrainingState(model, None, is_first_copy=False).weights())
    assert names - later == {
        f"model.norm.{n}" for n in ("running_mean", "running_var", "num_batches_tracked")
    }


def test_what_is_common_and_what_is_a_ranks_own_comes_back() -> None:
    model, optimizer = trained()
    saved = TrainingState(
        model, optimizer, common={"run": Thing(5)}, own={"mine": Thing(6), "more": Thing(7)}
    )
    found, values = saved.everything()
    assert values["common"] == {"run": {"value": 5}}
    own = unpack(found[own_name(0)])
    assert own["mine"] == {"value": 6}
    common, mine, other = Thing(), Thing(), Thing(1)
    new = TrainingState(
        *trained(), common={"run": common, "new": other}, own={"mine": mine, "new": other}
    )
    random.seed(own["mine"]["value"])
    new.restore(values, {name: own[name] for name in ("mine", "random")})
    assert (common.value, mine.value, other.value) == (5, 6, 1)


def test_a_users_object_that_fails_is_blamed_by_its_name() -> None:
    broken = Thing(error=ValueError("no"))
    state = TrainingState(Small(), None, own={"mine": broken})
    with pytest.raises(ValueError, match="^no") as caught:
        state.everything()
    assert "raised by state_dict of mine (stateful)" in "".join(caught.value.__notes__)
    broken.error = ValueError("no")
    with pytest.raises(ValueError, match="^no") as caught:
        state.restore({"common": {}}, {"mine": {}})
    assert "raised by load_state_dict of mine (stateful)" in "".join(caught.value.__notes__)


def test_optimizer_values_go_back_to_the_parameter_they_are_of() -> None:
    model, optimizer = trained()
    state = TrainingState(model, optimizer)
    values = {
        "optimizer": {"values": {"optimizer.linear.weight.beta": 7}, "groups": None},
        "common": {},
    }
    state.restore(values, {})
    assert optimizer.state[model.linear.weight]["beta"] == 7
    assert optimizer.param_groups[0]["lr"] == 0.1, "without groups, settings are those of now"
    assert state._optimizer_state()[1] == {"optimizer.linear.weight.beta": 7}
    optimizer.state[model.linear.weight]["beta"] = None
    assert state._optimizer_state()[1] == {}
    before = model.linear.weight.clone()
    state.restore({"common": {}}, {})
    assert torch.equal(before, model.linear.weight)


def test_settings_of_groups_come_back_in_the_form_they_have() -> None:
    _, optimizer = trained()
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
    saved = saved_groups(optimizer)
    assert saved[0]["betas"] == [0.8, 0.9]
    assert "params" not in saved[0]
    rate = optimizer.param_groups[0]["lr"]
    _restore_groups(optimizer, [{"lr": 0.5, "betas": [0.1, 0.2], "new": [1]}])
    group = optimizer.param_groups[0]
    assert group["lr"] is rate
    assert float(rate) == 0.5
    assert (group["betas"], group["new"]) == ((0.1, 0.2), [1])
    with pytest.raises(ConfigError) as caught:
        _restore_groups(optimizer, [])
    assert str(caught.value) == (
        "optimizer = AdamW: has 1 parameter groups, the checkpoint has 0; create the same "
        "optimizer as in the saved run"
    )


def test_what_json_can_hold_is_plain() -> None:
    given = {"a": (1, 2.5, None, True, "x"), 3: [torch.tensor(4)], "t": torch.tensor([2.0])}
    assert plain(given, "here") == {"a": [1, 2.5, None, True, "x"], "3": [4], "t": 2.0}
    for wrong in (torch.ones(2), {1}):
        with pytest.raises(ConfigError) as caught:
            plain(wrong, "here")
        assert str(caught.value) == (
            f"here = {type(wrong).__name__}: cannot be saved without pickle; keep only numbers, "
            "strings, lists, dicts and tensors in an optimizer's state"
        )


def test_a_ranks_own_tensor_is_known_by_its_name() -> None:
    assert own_name(7) == "rank.00007"
    assert is_own("rank.00007")
    assert is_own("rank.123456")
    assert not is_own("model.rank.00007")
    assert not is_own("rank.00007.more")


def test_all_that_needs_a_pickle_is_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        pack({"a": {1: Path()}, "fine": 1, "b": Path()})
    assert [problem.where for problem in caught.value.problems] == [
        "state_dict of a",
        "state_dict of b",
    ]
    assert pack({}).dtype == torch.uint8


class Accelerator:
    """A device with a random stream of its own."""

    device = torch.device("meta")

    def __init__(self) -> None:
        self.state = torch.tensor([1])

    def random_state(self) -> torch.Tensor:
        return self.state

    def set_random_state(self, state: torch.Tensor) -> None:
        self.state = state


def test_the_random_stream_of_a_device_is_kept_by_its_type() -> None:
    device: Any = Accelerator()
    state = _random_state(device)
    assert state["meta"].tolist() == [1]
    device.state = torch.tensor([2])
    _restore_random(state, device)
    assert device.state.tolist() == [1]
    cpu = accelerator_of(torch.device("cpu"))
    on_cpu = _random_state(cpu)
    assert set(on_cpu) == {"torch", "python", "numpy"}
    device.state = torch.tensor([3])
    _restore_random(on_cpu, device)
    assert device.state.tolist() == [3], "one that has none leaves it as it is"
    drawn = random.random()  # noqa: S311 - no secret
    _restore_random(unpack(pack(on_cpu)), cpu)
    assert random.random() == drawn  # noqa: S311


def test_a_value_made_of_two_functions() -> None:
    held = {"x": 1}
    value = Value(lambda: held["x"], lambda new: held.update(x=new))
    assert value.state_dict() == {"value": 1}
    value.load_state_dict({"value": 5})
    assert held == {"x": 5}


class Keeper:
    """An engine that keeps its state."""

    def __init__(self) -> None:
        self.made: list[bool] = []
        self.back: Any = None

    def model_state(self) -> dict[str, torch.Tensor]:
        return {"w": torch.zeros(2)}

    def optimizer_state(self, *, make: bool = False) -> dict[str, Any]:
        self.made.append(make)
        return {"w.exp": torch.zeros(2), "w.step": torch.tensor(0), "scale": (1, 2)}

    def put_back(self, *given: Any) -> None:
        self.back = given


def test_an_engines_state_is_made_to_be_loaded_and_not_to_be_saved() -> None:
    keeper: Any = Keeper()
    state = GatheredState(Small(), None, keeper=keeper)
    found, values = state.everything()
    assert keeper.made == [False]
    assert values["optimizer"] == {"values": {"optimizer.scale": [1, 2]}, "groups": []}
    assert {"model.w", "optimizer.w.exp", "optimizer.w.step"} < set(found)
    targets = state.load_targets()
    assert keeper.made == [False, True]
    state.forget(["optimizer.w.exp"])
    assert "optimizer.w.exp" in targets, "what was handed out stays"
    state.restore({"common": {}}, {})
    model, optimizer = keeper.back
    assert (set(model), set(optimizer)) == ({"w"}, {"w.step"})
    state.load_targets()
    saved = {"groups": [], "values": {"optimizer.scale": [3, 4]}}
    state.restore({"common": {}, "optimizer": saved}, {})
    assert keeper.back[1]["scale"] == [3, 4]
    assert saved["values"] == {"optimizer.scale": [3, 4]}
    assert state._targets == {}
