"""A loop of one's own that has come to its end leaves its weights, as Trainer's does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from drivetrain import prepare
from drivetrain.train.keep_loop import KeptLoop
from drivetrain.train.saving.weights import read_weights, weights_sha256
from drivetrain.verify import resume
from drivetrain.verify.drills.drill import DrillOutcome, NoFinalWeights, weights_fingerprint
from tests.ranks.resuming import Interrupted, go_on_in


def data() -> TensorDataset:
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, (x.sum(1) > 0).long())


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


@pytest.fixture
def config(quiet: dict[str, Any]) -> dict[str, Any]:
    checkpoint = {"every_steps": 4, "asynchronous": False}
    return {"global_batch_size": 8, "max_steps": 6, "checkpoint": checkpoint, **quiet}


def trained(config: dict[str, Any], leave_after: int = 99, fails: bool = False) -> KeptLoop:
    loop = prepare(lambda: nn.Linear(4, 2), None, data(), config)
    for number, step in enumerate(loop.steps(), 1):
        for batch in step:
            loop.backward(loss(loop.model, batch))
        loop.step()
        if number == leave_after and fails:
            raise Interrupted
        if number == leave_after:
            break
    return loop


def checkpoints(loop: KeptLoop) -> Path:
    assert loop.history.run_dir is not None
    return loop.history.run_dir / "checkpoints"


@pytest.mark.parametrize(("form", "name"), [("whole", "weights.pt"), ("sharded", "weights")])
def test_they_are_those_of_the_last_step(config: dict[str, Any], form: str, name: str) -> None:
    config["checkpoint"]["final_weights"] = form
    loop = trained(config)
    assert (checkpoints(loop) / name).exists()
    found = read_weights(checkpoints(loop))
    assert weights_sha256(found) == weights_sha256(loop.full_state_dict())


def test_a_stop_that_was_asked_for_is_an_end(config: dict[str, Any]) -> None:
    loop = prepare(lambda: nn.Linear(4, 2), None, data(), config)
    for step in loop.steps():
        for batch in step:
            loop.backward(loss(loop.model, batch))
        loop.step()
        loop.evaluate(data(), lambda model, batch: {"loss": loss(model, batch)})
        loop.stop("enough")
    assert loop.step_number == 1
    assert (checkpoints(loop) / "weights.pt").exists()


def test_the_best_lie_beside_them(config: dict[str, Any]) -> None:
    config["checkpoint"] |= {"keep_best": "loss"}
    loop, best = prepare(lambda: nn.Linear(4, 2), None, data(), config), ""
    for number, step in enumerate(loop.steps(), 1):
        for batch in step:
            loop.backward(loss(loop.model, batch))
        loop.step()
        score = torch.tensor(1.0 if number == 3 else 2.0)
        loop.evaluate(data(), lambda _, __, score=score: {"loss": score})  # type: ignore[misc]
        best = weights_sha256(loop.full_state_dict()) if number == 3 else best
    assert weights_sha256(read_weights(checkpoints(loop), "best")) == best
    assert weights_sha256(read_weights(checkpoints(loop))) != best


def test_several_models_lie_together_under_their_names(config: dict[str, Any]) -> None:
    models = {"G": lambda: nn.Linear(4, 2), "D": lambda: nn.Linear(4, 2)}
    loop = prepare(models, None, data(), config)
    for step in loop.steps():
        for name in models:
            for batch in step:
                loop.backward(loss(loop.model[name], batch), name)
            loop.step(name)
    found = read_weights(checkpoints(loop))
    assert sorted(found) == ["D.bias", "D.weight", "G.bias", "G.weight"]
    assert weights_sha256(found) == weights_sha256(loop.full_state_dict())


def test_a_loop_that_is_left_has_none_and_a_comparison_says_so(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = trained(config, leave_after=3)
    assert loop.history.run_dir is not None
    with pytest.raises(NoFinalWeights, match="wrote no final weights to compare .* by break"):
        weights_fingerprint(loop.history.run_dir)
    # started again it has nothing left to do, and so is at its end
    go_on_in(loop.history.run_dir, monkeypatch)
    again = trained(config)
    assert weights_fingerprint(loop.history.run_dir) == weights_sha256(again.full_state_dict())


def test_a_run_without_weights_is_not_certified_and_it_is_said_why(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was a traceback, after minutes of training."""
    loop = trained(config, leave_after=4)

    def run_once(setting: Any, faults: Any, folder: Path) -> DrillOutcome:
        folder.mkdir()
        (folder / "run").symlink_to(checkpoints(loop).parent)
        return DrillOutcome(())

    monkeypatch.setattr(resume, "run_once", run_once)
    certificate = resume.certify_resume(("train.py",), 4, 2, 2)
    assert not certificate.holds
    assert "wrote no final weights to compare" in certificate.problems[0]


def test_a_loop_that_failed_has_none(config: dict[str, Any]) -> None:
    with pytest.raises(Interrupted):
        trained(config, leave_after=5, fails=True)
    assert not list(Path(config["output_dir"]).glob("*/checkpoints/weights*"))
