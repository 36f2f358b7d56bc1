"""A moving average of the weights: the same numbers at any layout, saved, evaluated, exported."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import drivetrain
from drivetrain.cli import checkpoint as verbs
from drivetrain.core.errors import ConfigError
from drivetrain.record import session
from drivetrain.testing import run_ranks
from drivetrain.train.ema import EMA
from drivetrain.train.hooks import Hook
from drivetrain.train.saving.weights import weights_sha256
from drivetrain.train.task import Task
from drivetrain.train.trainer import Trainer
from tests.ranks.resuming import Interrupted

DECAY, STEPS = 0.8, 6
FSDP = {"strategy": "fsdp"}


def model() -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(6, 6), nn.GELU()) for _ in range(2)]
    frozen = nn.Linear(6, 6).requires_grad_(False)
    return nn.Sequential(frozen, nn.Sequential(*blocks), nn.Linear(6, 3))


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def samples() -> TensorDataset:
    inputs = torch.randn(16, 6, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, inputs.argmax(1) % 3)


class _ByHand(Hook):
    """The same average, of whole weights, one after the other."""

    def __init__(self, stops: int = 0) -> None:
        self.average: dict[str, torch.Tensor] = {}
        self._stops = stops

    def on_fit_start(self, trainer: Trainer) -> None:
        self.average = trainer.full_state_dict()

    def on_train_batch_end(self, trainer: Trainer, step: int) -> None:
        for name, weight in trainer.full_state_dict().items():
            self.average[name].lerp_(weight, 1 - DECAY)
        if step == self._stops:
            raise Interrupted


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(session.RUN_DIR, str(tmp_path / "own"))
    monkeypatch.setattr(session, "_opened", 0)


def train(
    folder: str, parallel: dict[str, Any], stops: int = 0, evaluate: bool = True
) -> dict[str, Any]:
    os.environ[session.RUN_DIR], session._opened = folder, 0
    config = {
        "global_batch_size": 8,
        "micro_batch_size": 4,
        "max_steps": STEPS,
        "parallel": parallel,
        "optimization": {"learning_rate": 0.05},
        "evaluation": {"every_steps": 2},
        "record": {"progress": "none", "sinks": []},
        # not where evaluations are
        "checkpoint": {"every_steps": 3, "keep_last": 9, "asynchronous": False},
    }
    ema, by_hand = EMA(decay=DECAY, evaluate=evaluate), _ByHand(stops)
    trainer = Trainer(Task(model, loss), config, hooks=[ema, by_hand])
    if stops:
        with pytest.raises(Interrupted):
            trainer.fit(samples(), samples())
        return {}
    history = trainer.fit(samples(), samples())
    with ema.applied():
        averages = trainer.full_state_dict()
        with pytest.raises(RuntimeError, match="cannot save"):
            _ = trainer.assembly.engine.averages.tensors  # type: ignore[union-attr]
    return {
        "averages": averages,
        "by hand": by_hand.average,
        "weights": weights_sha256(trainer.full_state_dict()),
        "losses": history.losses,
        "evaluations": [result.metrics["loss"] for result in history.evaluations],
    }


def on_two_ranks(output_dir: str) -> dict[str, dict[str, Any]]:
    found = {}
    for name, parallel in (("ddp", {}), ("fsdp", FSDP)):
        found[name] = train(f"{output_dir}/{name}", parallel)
        train(f"{output_dir}/{name}-killed", parallel, stops=5)
        found[f"{name} resumed"] = train(f"{output_dir}/{name}-killed", parallel)
    train(f"{output_dir}/moved", {}, stops=5)
    found["moved"] = train(f"{output_dir}/moved", FSDP)
    return {name: sent(each) for name, each in found.items()}


def sent(found: dict[str, Any]) -> dict[str, Any]:
    """Tensors would be gone with the process that made them."""
    arrays = {k: {n: t.numpy() for n, t in found[k].items()} for k in ("averages", "by hand")}
    return {**found, **arrays}


def received(found: dict[str, Any]) -> dict[str, Any]:
    keys = ("averages", "by hand")
    tensors = {k: {n: torch.from_numpy(v) for n, v in found[k].items()} for k in keys}
    return {**found, **tensors}


def close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=2e-5, atol=1e-6)


def test_averages_are_the_same_at_every_layout_and_after_a_kill(tmp_path: Path) -> None:
    alone = train(str(tmp_path / "alone"), {})
    plain = train(str(tmp_path / "plain"), {}, evaluate=False)
    ranks = run_ranks(on_two_ranks, 2, 120, args=(str(tmp_path),))
    found = {name: received(each) for name, each in ranks[0].items()}
    for name in ("ddp", "fsdp"):
        one, resumed = found[name], found[f"{name} resumed"]
        close(one["averages"], one["by hand"])
        assert weights_sha256(resumed["averages"]) == weights_sha256(one["averages"])
        assert resumed["weights"] == one["weights"]
        assert resumed["evaluations"] == one["evaluations"]
    for one in (*found.values(), alone):
        close(one["averages"], alone["by hand"])
        assert one["evaluations"] == pytest.approx(alone["evaluations"], rel=1e-5)
    # what is evaluated are the averages, and training goes on with the weights
    assert plain["losses"] == alone["losses"]
    assert plain["weights"] == alone["weights"]
    assert plain["evaluations"] != alone["evaluations"]
    trained = model()
    trained.load_state_dict(alone["averages"])
    expected = loss(trained.eval(), samples().tensors).item()
    assert alone["evaluations"][-1] == pytest.approx(expected, rel=1e-6)
    verbs.export(str(tmp_path / "fsdp"), str(tmp_path / "ema.pt"), None, 5.0, averages=True)
    exported = torch.load(tmp_path / "ema.pt", weights_only=True)
    assert weights_sha256(exported) == weights_sha256(found["fsdp"]["averages"])


def test_a_run_does_not_lose_its_averages_in_silence(tmp_path: Path) -> None:
    train(str(tmp_path / "run"), {}, stops=5)
    os.environ[session.RUN_DIR], session._opened = str(tmp_path / "run"), 0
    config: dict[str, Any] = {"global_batch_size": 8, "micro_batch_size": 4, "max_steps": STEPS}
    config["optimization"] = {"learning_rate": 0.05}
    with pytest.raises(ConfigError, match=r"ema.decay = none: was 0.8 when step-000000003"):
        Trainer(Task(model, loss), config).fit(samples())


def test_a_loop_of_ones_own_has_one(tmp_path: Path) -> None:
    config = {"global_batch_size": 8, "max_steps": STEPS, "output_dir": str(tmp_path)}
    ema = EMA(decay=DECAY)
    loop = drivetrain.prepare(model, None, samples(), config, ema=ema)
    average = loop.full_state_dict()
    for step in loop.steps():
        for batch in step:
            loop.backward(loss(loop.model, batch))
        loop.step()
        for name, weight in loop.full_state_dict().items():
            average[name].lerp_(weight, 1 - DECAY)
    with ema.applied():
        close(loop.full_state_dict(), average)


def test_what_cannot_be_averaged_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"EMA.decay = 1.0"):
        EMA(decay=1.0)
    with pytest.raises(RuntimeError, match="needs the model"):
        EMA().applied()
    config = {"global_batch_size": 8, "max_steps": 1, "output_dir": str(tmp_path)}
    with pytest.raises(ConfigError, match="already has an EMA"):
        Trainer(Task(model, loss), config, hooks=[EMA(), EMA()]).fit(samples())
