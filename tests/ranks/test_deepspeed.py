"""DeepSpeed's ZeRO: the same numbers, and checkpoints that any strategy goes on from."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from drivetrain.record import session
from drivetrain.testing import run_ranks
from drivetrain.train.hooks import Hook
from drivetrain.train.saving.weights import weights_sha256
from drivetrain.train.trainer import Trainer
from drivetrain.train.watch.utilization import num_weights
from tests.gpt_task import Sentences, collate, gpt_task
from tests.ranks.resuming import Interrupted
from tests.ranks.training import assert_same_training, largest_deviation, sentences, settings

pytestmark = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="pip install 'drivetrain[deepspeed]'"
)

STEPS, SAVED = 30, 15
# with DeepSpeed's own threshold, ZeRO-3 leaves parameters as small as all of these whole
CUT_ALL = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
DDP: dict[str, Any] = {"strategy": "ddp"}


def zero(stage: int, **more: Any) -> dict[str, Any]:
    details = {"zero_stage": stage, "config": CUT_ALL if stage == 3 else None, **more}
    return {"strategy": "deepspeed", "deepspeed": details}


ZERO: dict[str, dict[str, Any]] = {
    "1": zero(1),
    "2": zero(2),
    "3": zero(3),
    "2 offload": zero(2, offload_optimizer="cpu"),
    "3 offload": zero(3, offload_optimizer="cpu", offload_param="cpu"),
}


class StopAfter(Hook):
    """Ends a run where a test wants it to."""

    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Trainer, step: int) -> None:
        if step - 1 == self.step:
            raise Interrupted


def train(
    run_dir: str, parallel: dict[str, Any], stop: int | None = None, **changes: Any
) -> dict[int, float]:
    """Losses by step, and the evaluation's as one step more; goes on from what is in `run_dir`."""
    os.environ[session.RUN_DIR] = run_dir
    session._opened = 0
    checkpoint = {"every_steps": SAVED, "asynchronous": False}
    config = settings(
        run_dir, **{"max_steps": STEPS, "checkpoint": checkpoint, "parallel": parallel, **changes}
    )
    trainer = Trainer(gpt_task(), config, hooks=[StopAfter(stop)])
    try:
        history = trainer.fit(sentences(), DataLoader(Sentences(53), collate_fn=collate))
    except Interrupted:
        return {}
    losses = {metrics.step: metrics.loss for metrics in history.steps}
    return {**losses, STEPS + 1: history.evaluations[-1].metrics["loss"]}


def train_each(folder: str, each: dict[str, dict[str, Any]], **changes: Any) -> dict[str, Any]:
    """Several strategies one after the other in one world: ranks are started once."""
    return {
        name: train(f"{folder}/{index}", parallel, **changes)
        for index, (name, parallel) in enumerate(each.items())
    }


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """What one process trains, without DeepSpeed."""
    folder = str(tmp_path_factory.mktemp("reference"))
    losses = run_ranks(train, 1, args=(folder, DDP))[0]
    assert len(losses) == STEPS + 1
    return losses


def assert_same(losses: dict[int, float], reference: dict[int, float]) -> None:
    assert_same_training(list(losses.values()), [reference[step] for step in losses])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "names"),
    [
        (2, ["3"]),
        pytest.param(2, list(ZERO), marks=pytest.mark.long),
        pytest.param(3, ["1", "2", "3"], marks=pytest.mark.long),
    ],
)
def test_every_stage_trains_what_one_process_trains(
    world_size: int, names: list[str], reference: dict[int, float], tmp_path: Path
) -> None:
    each = {name: ZERO[name] for name in names}
    for by_name in run_ranks(train_each, world_size, 500, args=(str(tmp_path), each)):
        for losses in by_name.values():
            assert len(losses) == STEPS + 1
            assert_same(losses, reference)


def cut_with_two_groups(folder: str) -> list[dict[int, float]]:
    """One strategy for the first half, another for the second: what is saved has both groups."""
    decays: dict[str, Any] = {"optimization": {"learning_rate": 3e-3, "weight_decay": 0.3}}
    whole = train(f"{folder}/whole", DDP, **decays)
    train(f"{folder}/cut", ZERO["2"], stop=SAVED, **decays)
    return [whole, train(f"{folder}/cut", DDP, **decays)]


@pytest.mark.slow
@pytest.mark.long
def test_every_group_of_an_optimizer_is_saved(tmp_path: Path) -> None:
    """DeepSpeed links a group's state after the first one's step; others' was not found."""
    for whole, resumed in run_ranks(cut_with_two_groups, 2, 300, args=(str(tmp_path),)):
        assert min(resumed) == SAVED + 1
        assert_same(resumed, whole)


class CountsWeights(Hook):
    """The model's size, as utilisation is computed from it, once DeepSpeed has partitioned it."""

    def on_train_batch_end(self, trainer: Trainer, step: int) -> None:
        assert trainer.assembly is not None
        model = trainer.assembly.engine.spread.inner
        self.num_weights = num_weights(model)
        self.num_here = sum(p.numel() for p in model.parameters())


def counted_weights(folder: str) -> tuple[int, int]:
    hook = CountsWeights()
    config = settings(folder, max_steps=5, parallel=ZERO["3"], checkpoint={"every_steps": None})
    Trainer(gpt_task(), config, hooks=[hook]).fit(sentences())
    return hook.num_weights, hook.num_here


@pytest.mark.slow
@pytest.mark.long
def test_partitioned_weights_are_counted_whole(tmp_path: Path) -> None:
    expected = sum(p.numel() for p in gpt_task().model().parameters())
    assert run_ranks(counted_weights, 2, args=(str(tmp_path),)) == [(expected, 0)] * 2


def handed_over(folder: str, changes: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Stopped after step 15 under one strategy, gone on with under another."""
    losses = {}
    for index, (name, (before, after)) in enumerate(changes.items()):
        train(f"{folder}/{index}", before, stop=SAVED)
        losses[name] = train(f"{folder}/{index}", after)
    return losses


FSDP = {"strategy": "fsdp"}


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    "changes",
    [
        {"2-fsdp": [ZERO["2"], FSDP]},
        pytest.param(
            {"ddp-1": [DDP, ZERO["1"]], "fsdp-2": [FSDP, ZERO["2"]], "ddp-3": [DDP, ZERO["3"]]},
            marks=pytest.mark.long,
        ),
        pytest.param(
            {
                "offload": [ZERO["3 offload"], ZERO["2 offload"]],
                "2-3": [ZERO["2"], ZERO["3 offload"]],
            },
            marks=pytest.mark.long,
        ),
    ],
    ids=["from zero", "to zero", "between stages"],
)
def test_a_checkpoint_is_gone_on_from_under_any_strategy(
    changes: dict[str, list[dict[str, Any]]], reference: dict[int, float], tmp_path: Path
) -> None:
    for by_name in run_ranks(handed_over, 2, 500, args=(str(tmp_path), changes)):
        for name, losses in by_name.items():
            assert min(losses) == SAVED + 1, name
            assert_same(losses, reference)


def train_whole_and_resumed(folder: str) -> None:
    for stage in ("1", "2", "3"):
        train(f"{folder}/{stage}-whole", ZERO[stage])
        train(f"{folder}/{stage}-resumed", ZERO[stage], stop=SAVED)
        train(f"{folder}/{stage}-resumed", ZERO[stage])


@pytest.mark.slow
@pytest.mark.long
def test_the_same_stage_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    run_ranks(train_whole_and_resumed, 2, 500, args=(str(tmp_path),))
    for stage in ("1", "2", "3"):
        whole, resumed = (
            weights_sha256(torch.load(tmp_path / f"{stage}-{name}/checkpoints/weights.pt"))
            for name in ("whole", "resumed")
        )
        assert whole == resumed


def train_in_bf16(folder: str) -> dict[str, Any]:
    each = {"1": ZERO["1"], "3": ZERO["3"]}
    return train_each(folder, each, max_steps=12, precision={"dtype": "bf16"})


@pytest.mark.slow
@pytest.mark.long
def test_bf16_stays_close(reference: dict[int, float], tmp_path: Path) -> None:
    """bf16 keeps 8 bits of mantissa."""
    for by_name in run_ranks(train_in_bf16, 2, 120, args=(str(tmp_path),)):
        for losses in by_name.values():
            # the schedule falls over 12 steps instead of 30, so only its warm-up can be compared
            steps = range(1, 6)
            deviation = largest_deviation(
                [losses[step] for step in steps], [reference[step] for step in steps]
            )
            assert 0 < deviation < 2e-2
