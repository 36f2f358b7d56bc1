"""A run that begins with another's checkpoint under other settings."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from drivetrain import ConfigError, Hook, Task, Trainer
from drivetrain.checkpoint import pins
from drivetrain.checkpoint.locate import locate
from drivetrain.checkpoint.manifest import DamagedCheckpoint
from drivetrain.checkpoint.storage import storage_at
from drivetrain.record.session import ACCEPT_CHANGE
from drivetrain.tune.perturb import MUTABLE
from tests.ranks.resuming import go_on_in

OLD = {"learning_rate": 0.1, "momentum": 0.9, "weight_decay": 0.2, "max_grad_norm": 100.0}
NEW = {"learning_rate": 0.04, "momentum": 0.5, "weight_decay": 0.05, "max_grad_norm": 0.01}


def data() -> TensorDataset:
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.sum(1, keepdim=True))


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


class Seen(Hook):
    """The first step as torch's optimizer sees it, and what came of it."""

    def __init__(self) -> None:
        self.gradient = self.before = self.after = torch.empty(0)

    def on_before_optimizer_step(self, trainer: Trainer, step: int) -> None:
        if not self.before.numel():
            weight = trainer.model.weight
            assert isinstance(weight, nn.Parameter)
            assert weight.grad is not None
            self.before, self.gradient = weight.detach().clone(), weight.grad.clone()

    def on_train_batch_end(self, trainer: Trainer, step: int) -> None:
        if not self.after.numel():
            weight = trainer.model.weight
            assert isinstance(weight, nn.Parameter)
            self.after = weight.detach().clone()


def train(quiet: dict[str, Any], name: str, settings: dict[str, Any], **changes: Any) -> Seen:
    seen = Seen()
    config = {
        **quiet,
        "name": name,
        "global_batch_size": 8,
        "max_steps": 8,
        "optimization": {"optimizer": "sgd", **settings},
        **changes,
        "checkpoint": {"every_steps": 1, "asynchronous": False, **changes.get("checkpoint", {})},
    }
    Trainer(Task(lambda: nn.Linear(4, 1), loss), config, [seen]).fit(data())
    return seen


def accept(monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]) -> None:
    monkeypatch.setenv(ACCEPT_CHANGE, ",".join(f"optimization.{key}" for key in settings))


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_new_settings_take_effect_and_all_else_is_the_donors(
    quiet: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, schedule: str
) -> None:
    """What the donor's optimizer had in its groups must not come back with its state."""
    old, new = ({**each, "lr_scheduler_type": schedule} for each in (OLD, NEW))
    keep = {"keep_every": 1}
    train(quiet, "donor", old, stop_at_step=6, checkpoint=keep)
    address = f"{tmp_path}/donor/checkpoints/step-000000004-a1"
    accept(monkeypatch, NEW)
    seen = train(quiet, "child", new, stop_at_step=5, checkpoint={"resume_from": address})

    at = locate(f"{tmp_path}/donor")
    from drivetrain.checkpoint.whole_tensors import WholeTensors

    donor = WholeTensors(at.storage, at.choose(4))
    weight = donor.read("model.weight")
    momentum = donor.read("optimizer.weight.momentum_buffer")
    assert torch.equal(seen.before, weight), "of step 4, though there is a step 6"
    factor = 1.0 if schedule == "constant" else 0.5  # half-way down
    change = seen.gradient + NEW["weight_decay"] * weight
    change = NEW["momentum"] * momentum + change
    expected = weight - factor * NEW["learning_rate"] * change
    assert torch.allclose(seen.after, expected, rtol=0, atol=1e-7)
    assert float(seen.gradient.norm()) < 0.0101, "clipped as the child has it"

    child = locate(f"{tmp_path}/child").choose().values
    group = child["optimizer"]["groups"][0]
    assert (group["momentum"], group["weight_decay"]) == (0.5, 0.05)
    donors = at.choose(4).values["common"]
    assert child["common"]["run"]["value"]["at"]["step"] == 5
    assert donors["run"]["value"]["at"]["step"] == 4


def test_a_checkpoint_that_is_not_there_is_said(quiet: dict[str, Any], tmp_path: Path) -> None:
    train(quiet, "donor", OLD, stop_at_step=2)
    address = f"{tmp_path}/donor/checkpoints/step-000000009-a1"
    with pytest.raises(ConfigError, match=r"resume_from = .*: no manifest.json"):
        train(quiet, "child", OLD, checkpoint={"resume_from": address})


def test_a_pinned_step_stays_until_it_is_released(
    quiet: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = {"keep_last": 1}
    train(quiet, "donor", OLD, stop_at_step=2, checkpoint=rule)
    storage = storage_at(tmp_path / "donor/checkpoints")
    pinned = "step-000000002-a1"
    for holder in ("one", "two", "two"):
        pins.pin(storage, pinned, holder)
    assert pins.pinned(storage) == {pinned: ["one", "two"]}

    def go_on(step: int) -> None:
        go_on_in(tmp_path / "donor", monkeypatch)
        train(quiet, "donor", OLD, stop_at_step=step, checkpoint=rule)

    go_on(4)
    assert {"step-000000002-a1", "step-000000004-a2"} <= set(storage.names())
    pins.release(storage, pinned, "one")
    go_on(6)
    assert pinned in storage.names(), "the other still needs it"
    pins.release(storage, pinned, "two")
    go_on(8)
    left = [name for name in storage.names() if name.startswith(("step", "pin"))]
    assert left == ["step-000000008-a4"]
    with pytest.raises(DamagedCheckpoint, match="deleted"):
        pins.pin(storage, pinned, "late")
    assert pins.pinned(storage) == {}


def test_every_key_that_may_be_mutated_is_one_whose_change_can_be_accepted(
    quiet: dict[str, Any], tmp_path: Path
) -> None:
    train(quiet, "any", OLD, stop_at_step=1)
    terms = locate(f"{tmp_path}/any").choose().contract
    assert terms.keys() >= MUTABLE
    assert ACCEPT_CHANGE not in os.environ
