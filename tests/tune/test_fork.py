"""A run that begins with another's checkpoint under other settings."""

from __future__ import annotations

import os
from dataclasses import replace
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
from drivetrain.checkpoint.whole_tensors import WholeTensors
from drivetrain.core.errors import DrivetrainError
from drivetrain.launch.targets.local import Local
from drivetrain.record.session import ACCEPT_CHANGE
from drivetrain.tune import fork, lineage
from drivetrain.tune.journal import Asked, Ended, Fork, State
from drivetrain.tune.perturb import MUTABLE
from drivetrain.tune.population import Due
from drivetrain.tune.replay import segments
from drivetrain.tune.settings import Settings, Study, open_study
from drivetrain.tune.space import Float, Space
from drivetrain.tune.trial_run import Runner, local_job
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


def population_in(path: Path) -> Study:
    space = Space({"optimization.learning_rate": Float(1e-3, 1.0, log=True)})
    settings = Settings("train.py", ("a.b=c",), num_trials=2, population=2, rungs=(2, 4))
    return open_study(path / "study", settings, space)


def test_a_fork_is_begun_pinned_and_released(quiet: dict[str, Any], tmp_path: Path) -> None:
    """Which pins there are follows from the journal and the forks' directories, at any moment."""
    made, state = population_in(tmp_path), State()
    for trial in range(2):
        state.take(Asked(trial, {"optimization.learning_rate": 0.1}))
    runs = {**quiet, "output_dir": str(made.path / "trials")}
    train(runs, "00000", OLD, stop_at_step=2)
    due = Due(2, 1, 0, 0, 2, {"optimization.learning_rate": 0.08})
    asked = fork.begun(made, due)
    assert asked.fork == Fork(0, 0, 2, 1, "trials/00000/checkpoints/step-000000002-a1")
    state.take(asked)
    storage = storage_at(made.run_dir(0) / "checkpoints")
    for _ in range(2):  # a driver that was killed, and the next
        fork.Pins(made).keep(state)
        assert pins.pinned(storage) == {"step-000000002-a1": ["trial-00002"]}
    job = Runner(made, Local(), local_job(made)).job(asked, 1)
    address = f"{made.path.absolute()}/{asked.fork.checkpoint}"
    assert job.script_args[-2:] == ("stop_at_step=4", f"checkpoint.resume_from={address}")
    assert job.flags == ("--accept-change=optimization.learning_rate",)

    train(runs, "00002", OLD, stop_at_step=4, checkpoint={"resume_from": address})
    fork.Pins(made).keep(state)
    assert pins.pinned(storage) == {}, "it has a checkpoint of its own"

    ended = State(list(state.asked))
    ended.take(replace(asked, trial=3))
    fork.Pins(made).keep(ended)
    assert pins.pinned(storage) == {"step-000000002-a1": ["trial-00003"]}
    ended.take(Ended(3, 1, "not_finite"))
    fork.Pins(made).keep(ended)
    assert pins.pinned(storage) == {}, "nothing more comes of it"
    with pytest.raises(DrivetrainError, match=r"trial 4 cannot start from trial 1 at step 2"):
        fork.begun(made, Due(4, 0, 1, 0, 2, {}))


def test_a_line_is_replayed_in_parts(tmp_path: Path) -> None:
    made, state = population_in(tmp_path), State()
    for trial, origin in enumerate((None, None, Fork(1, 0, 2, 0, "x"), Fork(2, 1, 4, 1, "x"))):
        state.take(Asked(trial, {"optimization.learning_rate": 0.1 + trial}, origin))
    for trial, rung in ((0, 0), (1, 0), (1, 1), (2, 1), (2, 2), (3, 2)):
        state.take(Ended(trial, rung, "done", 2 * rung + 2, 0.5 - 0.1 * trial))
    parts = [(each.trial, each.stop_at) for each in segments(made, state, 3)]
    assert parts == [(1, 2), (2, 4), (3, None)]
    assert [(each.trial, each.stop_at) for each in segments(made, state, 1)] == [(1, 4)]
    assert lineage.tree(made, state) == [
        "0  learning_rate=0.1  (2: 0.5)",
        "1  learning_rate=1.1  (2: 0.4, 4: 0.4)",
        "└─ 2  from step 2: learning_rate 1.1 → 2.1  (4: 0.3, 6: 0.3)",
        "   └─ 3  from step 4: learning_rate 2.1 → 3.1  (6: 0.2)  *",
    ]
    state.take(Asked(4, {}, Fork(0, 0, 2, 0, "x")))
    with pytest.raises(ConfigError, match="--trial = 4: has not reached a rung"):
        segments(made, state, 4)
