"""Calls that a script kept from its earlier loop although `loop.step()` makes them: refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from drivetrain import ConfigError, prepare
from drivetrain.testing import run_ranks
from drivetrain.train.keep_loop import KeptLoop

CLEARED = (
    "gradients: no weight has a gradient at loop.step(); remove optimizer.zero_grad() from the "
    "script, loop.step() does that"
)
CLEARED_BETWEEN = (
    "gradients: those of this step's earlier micro-batches were cleared; remove "
    "optimizer.zero_grad() from the script, loop.step() does that"
)
CHANGED = (
    "gradients: were changed after a micro-batch that is not the step's last; set "
    "optimization.max_grad_norm and remove clip_grad_norm_, or change gradients once, after the "
    "last micro-batch and before loop.step()"
)
STEPPED = (
    "optimizer = SGD: is stepped by both the script and the run; remove optimizer.step() from the "
    "script, loop.step() does it"
)
Call = Callable[[KeptLoop], Any]


def data() -> TensorDataset:
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, (x.sum(1) > 0).long())


def settings(output_dir: str, **changes: Any) -> dict[str, Any]:
    return {
        "global_batch_size": 8,
        "max_steps": 3,
        "output_dir": output_dir,
        "checkpoint": {"every_steps": None},
        "record": {"progress": "none", "sinks": []},
        **changes,
    }


def nothing(loop: KeptLoop) -> None:
    """Leave out a call."""


def clear(loop: KeptLoop) -> None:
    loop.optimizer.zero_grad()


def fill_with_zeros(loop: KeptLoop) -> None:
    loop.optimizer.zero_grad(set_to_none=False)


def update(loop: KeptLoop) -> None:
    loop.optimizer.step()


def train(
    config: dict[str, Any],
    *,
    first: Call = nothing,
    inside: Call = nothing,
    between: Call = nothing,
    after: Call = nothing,
) -> list[float]:
    """Train with calls before backward, after it, before `loop.step()` and after it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    loop = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data(), config)
    for step in loop.steps():
        for x, y in step:
            first(loop)
            loop.backward(F.cross_entropy(loop.model(x), y))
            inside(loop)
        between(loop)
        loop.step()
        after(loop)
    return loop.history.losses


def refusal(config: dict[str, Any], **calls: Call) -> str:
    with pytest.raises(ConfigError) as raised:
        train(config, **calls)
    return str(raised.value)


def test_gradients_cleared_before_the_step_are_missed(tmp_path: Path) -> None:
    config = settings(str(tmp_path))
    assert refusal(config, between=clear) == CLEARED
    assert refusal(config, inside=clear) == CLEARED


def test_gradients_cleared_between_micro_batches_are_missed(tmp_path: Path) -> None:
    config = settings(str(tmp_path), micro_batch_size=4)
    assert refusal(config, first=clear) == CLEARED_BETWEEN
    assert refusal(config, inside=clear) == CLEARED_BETWEEN


def test_cleared_where_there_are_none_they_are_not(tmp_path: Path) -> None:
    expected = train(settings(str(tmp_path)))
    assert train(settings(str(tmp_path)), first=clear, after=clear) == expected


def test_gradients_filled_with_zeros_are_missed_too(tmp_path: Path) -> None:
    config = settings(str(tmp_path))
    assert refusal(config, between=fill_with_zeros) == CLEARED
    assert refusal(config, inside=fill_with_zeros) == CLEARED
    config = settings(str(tmp_path), micro_batch_size=4)
    assert refusal(config, first=fill_with_zeros) == CLEARED_BETWEEN
    expected = train(settings(str(tmp_path)))
    config = settings(str(tmp_path))
    assert train(config, first=fill_with_zeros, after=fill_with_zeros) == expected


def test_zeros_are_refused_only_where_zero_grad_made_all_of_them(tmp_path: Path) -> None:
    def clear_one(loop: KeptLoop) -> None:
        loop.optimizer.param_groups[0]["params"][0].grad.zero_()

    def clear_all(loop: KeptLoop) -> None:
        for weight in loop.model.parameters():
            weight.grad.zero_()  # as a loss with margins may leave them

    train(settings(str(tmp_path)), between=clear_one)
    train(settings(str(tmp_path)), between=clear_all)


def test_a_zero_grad_that_a_script_has_replaced_is_still_called(tmp_path: Path) -> None:
    calls: list[bool] = []
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own = optimizer.zero_grad

    def replaced(set_to_none: bool = True) -> None:
        calls.append(set_to_none)
        own(set_to_none)

    optimizer.zero_grad = replaced  # type: ignore[method-assign]
    loop = prepare(model, optimizer, data(), settings(str(tmp_path)))
    for step in loop.steps():
        for x, y in step:
            loop.backward(F.cross_entropy(loop.model(x), y))
        loop.step()
    assert calls == [True] * 3


def clip(loop: KeptLoop) -> None:
    nn.utils.clip_grad_norm_(loop.model.parameters(), 0.01)


def test_gradients_clipped_before_they_are_complete_are_refused(tmp_path: Path) -> None:
    assert refusal(settings(str(tmp_path), micro_batch_size=4), inside=clip) == CHANGED
    clipped = train(settings(str(tmp_path), micro_batch_size=4), between=clip)
    assert clipped != train(settings(str(tmp_path), micro_batch_size=4))
    whole = settings(str(tmp_path), micro_batch_size=8)
    assert train(whole, inside=clip) == train(whole, between=clip) == pytest.approx(clipped)


def test_bitwise_has_its_own_place_for_gradients(tmp_path: Path) -> None:
    config = settings(str(tmp_path), reproducibility="bitwise", micro_batch_size=4)
    train(config)
    said = "gradients: a micro-batch's were cleared or replaced, and reproducibility=bitwise adds"
    assert refusal(config, first=clear).startswith(said)
    assert refusal(config, inside=clear).startswith(said)
    assert refusal(config, between=clear) == CLEARED


def test_a_frozen_layer_and_an_unused_one_have_no_gradients(tmp_path: Path) -> None:
    used = nn.Linear(4, 2)
    model = nn.ModuleDict({"frozen": nn.Linear(4, 2), "unused": nn.Linear(4, 2), "used": used})
    before = used.weight.tolist()
    model["frozen"].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loop = prepare(model, optimizer, data(), settings(str(tmp_path), micro_batch_size=4))
    for step in loop.steps():
        for x, y in step:
            loop.backward(F.cross_entropy(loop.model["frozen"](x) + loop.model["used"](x), y))
        loop.step()
    assert used.weight.tolist() != before


def test_a_loss_of_no_weight_that_the_optimizer_has_is_refused(tmp_path: Path) -> None:
    model = nn.ModuleDict({name: nn.Linear(4, 2) for name in ("stepped", "used")})
    optimizer = torch.optim.SGD(model["stepped"].parameters(), lr=0.1)
    loop = prepare(model, optimizer, data(), settings(str(tmp_path)))
    with pytest.raises(ConfigError, match="loss: depends on no weight of the optimizer"):
        for step in loop.steps():
            for x, y in step:
                loop.backward(F.cross_entropy(loop.model["used"](x), y))
            loop.step()


def test_an_optimizer_that_the_script_steps_too_is_refused(tmp_path: Path) -> None:
    config = settings(str(tmp_path))
    assert refusal(config, between=update) == STEPPED
    assert refusal(config, inside=update) == STEPPED
    assert refusal(config, after=update) == STEPPED


def test_one_of_several_optimizers_is_refused_too(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in model]
    loop = prepare(model, optimizers, data(), settings(str(tmp_path)))
    with pytest.raises(ConfigError) as raised:
        for step in loop.steps():
            for x, y in step:
                loop.backward(F.cross_entropy(loop.model(x), y))
            optimizers[1].step()
            loop.step()
    assert str(raised.value) == STEPPED


def test_the_runs_own_steps_are_none_of_the_scripts(tmp_path: Path) -> None:
    """To read the state of an optimizer that has made no step, torch makes one."""
    config = settings(str(tmp_path), checkpoint={"every_steps": 1, "asynchronous": False})
    val = data()
    model = nn.Linear(4, 2)
    loop = prepare(model, torch.optim.Adam(model.parameters()), data(), config)
    for step in loop.steps():
        for x, y in step:
            loop.backward(F.cross_entropy(loop.model(x), y))
        loop.step()
        loop.evaluate(
            val, lambda model, batch: {"loss": F.cross_entropy(model(batch[0]), batch[1])}
        )
        loop.save()
    loop.optimizer.step()  # the run is over


def of_two(config: dict[str, Any], call: Callable[[dict[str, Any]], Any]) -> None:
    """Train two models in turn, with a call between the second's backward and its step."""
    models = {name: nn.Linear(4, 2) for name in "ab"}
    optimizers = {n: torch.optim.SGD(m.parameters(), lr=0.1) for n, m in models.items()}
    loop = prepare(models, optimizers, data(), config)
    for step in loop.steps():
        for name in "ab":
            for x, y in step:
                loop.backward(F.cross_entropy(loop.model[name](x), y), name)
            if name == "b":
                call(optimizers)
            loop.step(name)


def test_of_several_models_each_has_its_own(tmp_path: Path) -> None:
    config = settings(str(tmp_path))
    of_two(config, lambda optimizers: optimizers["a"].zero_grad())
    with pytest.raises(ConfigError) as raised:
        of_two(config, lambda optimizers: optimizers["b"].zero_grad())
    assert str(raised.value) == CLEARED
    with pytest.raises(ConfigError) as raised:
        of_two(config, lambda optimizers: optimizers["a"].step())
    assert str(raised.value) == STEPPED


def on_ranks(output_dir: str) -> list[str]:
    """What each strategy says of each leftover; a rank has two micro-batches."""
    said = []
    for strategy in ("ddp", "fsdp", "local_sgd"):
        config = settings(output_dir, parallel={"strategy": strategy})
        said.append(refusal(config, between=fill_with_zeros))
        config = settings(output_dir, micro_batch_size=2, parallel={"strategy": strategy})
        train(config, after=clear)
        said += [refusal(config, between=clear), refusal(config, between=update)]
    return said


def test_ranks_say_so_too_with_every_strategy(tmp_path: Path) -> None:
    """Not that ddp should look for unused parameters, or that fsdp replaced the weights."""
    for said in run_ranks(on_ranks, 2, 120, args=(str(tmp_path),)):
        assert said == [CLEARED, CLEARED, STEPPED] * 3
