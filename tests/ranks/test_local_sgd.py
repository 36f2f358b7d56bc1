"""Local SGD and DiLoCo: ddp where they must be, one model on all ranks whenever it is shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from drivetrain.cluster.environments import Identity
from drivetrain.parallel.layout import Layout
from drivetrain.parallel.world import World
from drivetrain.strategies.local_sgd import LocalSGD
from drivetrain.strategies.local_sgd.strategy import LocalModel, Rounds
from drivetrain.testing import run_ranks
from drivetrain.train.hooks import Hook
from drivetrain.train.saving.weights import weights_sha256
from drivetrain.train.trainer import Trainer
from tests.gpt_task import Sentences, collate, gpt_task
from tests.ranks.test_communication import sgd_task
from tests.ranks.test_resume import SAVED, interrupted, train
from tests.ranks.training import NUM_VAL, assert_same_training, sentences, settings

STEPS = 20


def local(**details: Any) -> dict[str, Any]:
    return {"strategy": "local_sgd", "local_sgd": details}


def train_with_sgd(output_dir: str, parallel: dict[str, Any]) -> list[float]:
    # no clipping: ddp clips the mean gradient, a rank that trains alone clips its own
    config = settings(
        output_dir, max_steps=STEPS, optimization={"learning_rate": 0.1}, parallel=parallel
    )
    return Trainer(sgd_task(), config).fit(sentences()).losses


def one_step_rounds(output_dir: str) -> tuple[list[float], list[float]]:
    alone = train_with_sgd(output_dir, local(inner_steps=1))
    return alone, train_with_sgd(output_dir, {"strategy": "ddp"})


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.long
def test_rounds_of_one_sgd_step_are_ddp(world_size: int, tmp_path: Path) -> None:
    """With samples of unequal length: ranks count for what they have counted."""
    for alone, ddp in run_ranks(one_step_rounds, world_size, 120, args=(str(tmp_path),)):
        assert ddp[-1] < ddp[0]
        assert_same_training(alone, ddp)


def warm_up_only(output_dir: str) -> tuple[list[float], list[float]]:
    losses = []
    for parallel in (local(warmup_steps=STEPS), {"strategy": "ddp"}):
        config = settings(output_dir, max_steps=STEPS, parallel=parallel)
        losses.append(Trainer(gpt_task(), config).fit(sentences()).losses)
    return losses[0], losses[1]


@pytest.mark.slow
@pytest.mark.long
def test_the_warm_up_is_ddp(tmp_path: Path) -> None:
    """AdamW, clipping and schedule included."""
    for warm_up, ddp in run_ranks(warm_up_only, 3, 120, args=(str(tmp_path),)):
        assert_same_training(warm_up, ddp)


class Fingerprints(Hook):
    """Of this rank's own weights, after every step."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_train_batch_end(self, trainer: Trainer, step: int) -> None:
        self.seen.append(weights_sha256(trainer.model.state_dict()))


def watched(output_dir: str, outer: str) -> tuple[list[str], list[float], list[float]]:
    hook = Fingerprints()
    parallel = local(inner_steps=4, outer=outer, warmup_steps=2, outer_dtype="bf16")
    config = settings(output_dir, max_steps=40, parallel=parallel, evaluation={"every_steps": 5})
    trainer = Trainer(gpt_task(), config, hooks=[hook])
    history = trainer.fit(sentences(), DataLoader(Sentences(NUM_VAL), collate_fn=collate))
    return hook.seen, history.losses, [e.metrics["loss"] for e in history.evaluations]


@pytest.mark.slow
@pytest.mark.parametrize("outer", ["average", "diloco"])
@pytest.mark.long
def test_ranks_part_and_agree(outer: str, tmp_path: Path) -> None:
    one, other = run_ranks(watched, 2, 120, args=(str(tmp_path), outer))
    same = [step for step in range(40) if one[0][step] == other[0][step]]
    assert same == [0, 1, *range(5, 40, 4), 39]  # warm-up, the ends of rounds, the last step
    assert one[1] == other[1], "the loss is that of the whole batch, whoever reports it"
    assert one[1][-1] < one[1][0] - 0.1
    assert one[2][-1] < one[2][0]
    # after steps 10 and 15 a round is open: shown is the model agreed on after step 10 and 14
    assert len(set(one[2])) == len(one[2])


ALONE: dict[str, Any] = {"parallel": local(inner_steps=7)}
DILOCO: dict[str, Any] = {"parallel": local(inner_steps=7, outer="diloco", warmup_steps=3)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [pytest.param(ALONE, marks=pytest.mark.long), DILOCO], ids=["average", "diloco"]
)
def test_a_run_goes_on_in_the_middle_of_a_round(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, changes: dict[str, Any]
) -> None:
    """The checkpoint, in the middle of a round, holds each rank's own weights and optimizer."""
    whole = run_ranks(train, 2, args=(str(tmp_path), None, changes))[0]
    resumed = interrupted(monkeypatch, tmp_path, (2, changes), (2, changes))
    assert resumed[1] == whole[1]
    assert resumed[0] == {step: loss for step, loss in whole[0].items() if step > SAVED}


@pytest.mark.slow
@pytest.mark.long
def test_another_number_of_ranks_goes_on_from_the_model_last_agreed_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    losses, _ = interrupted(monkeypatch, tmp_path, (2, DILOCO), (3, DILOCO))
    assert losses[60] < losses[31]


def world_of_one() -> World:
    identity = Identity("alone", 0, 0, 1, 1, 0, "127.0.0.1", 0)
    return World(identity, Layout(), torch.device("cpu"), None)


def test_the_outer_step_is_torchs_nesterov() -> None:
    model = nn.Linear(3, 2)
    reference = nn.Linear(3, 2)
    reference.load_state_dict(model.state_dict())
    outer = torch.optim.SGD(reference.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    spread = LocalModel(model, LocalSGD(outer="diloco"), world_of_one())
    for _ in range(4):
        spread.about_to_move(torch.tensor([8.0]))
        with torch.no_grad():
            for mine, agreed in zip(model.parameters(), reference.parameters(), strict=True):
                move = torch.randn_like(mine)
                mine.add_(move)
                agreed.grad = -move
        spread.agree()
        outer.step()
        for mine, agreed in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine, agreed)


def test_in_the_middle_of_a_round_the_agreed_model_is_shown() -> None:
    model = nn.Linear(3, 2)
    spread = LocalModel(model, LocalSGD(), world_of_one())
    before = weights_sha256(model.state_dict())
    spread.about_to_move(torch.tensor([8.0]))
    nn.init.ones_(model.weight)
    mine = weights_sha256(model.state_dict())
    with spread.shown_weights():
        assert weights_sha256(model.state_dict()) == before
        saved = spread.state_dict()
    assert weights_sha256(model.state_dict()) == mine
    assert weights_sha256(spread.full_state()) == before
    torch.testing.assert_close(saved["weights"][:6], torch.ones(6))


def test_rounds() -> None:
    rounds = Rounds(inner_steps=4, warmup_steps=2, total_steps=12)
    assert [step for step in range(12) if rounds.is_warmup(step)] == [0, 1]
    assert [step for step in range(12) if rounds.ends_after(step)] == [5, 9, 11]
