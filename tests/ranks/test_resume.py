"""40 steps = 24 + SIGKILL + what was lost and left: the same losses, the same bits."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from drivetrain.core.errors import WorkerFailure
from drivetrain.record.session import RUN_DIR
from drivetrain.testing import run_ranks
from drivetrain.train.hooks import Hook
from drivetrain.train.saving.weights import weights_sha256
from drivetrain.train.trainer import Trainer
from tests.gpt_task import gpt_task
from tests.ranks.training import PARITY, sentences, settings

Outcome = tuple[dict[int, float], str]
SAVED = 20
"""The last step that was saved before the kill."""


class Kill(Hook):
    """The last rank dies after a step, without warning; the save before is safe by then."""

    def __init__(self, at: int | None) -> None:
        self.at = at

    def on_train_batch_end(self, trainer: Trainer, step: int) -> None:
        assert trainer.assembly is not None
        world = trainer.assembly.world
        if step - 1 == self.at and world.rank == world.layout.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)


def train(output_dir: str, kill_at: int | None, changes: dict[str, Any]) -> Outcome:
    changes = dict(changes)
    save = changes.pop("save", "sharded")
    checkpoint = {"every_steps": 10, "asynchronous": False, "save": save}
    config = settings(output_dir, max_steps=40, checkpoint=checkpoint, **changes)
    trainer = Trainer(gpt_task(), config, hooks=[Kill(kill_at)])
    history = trainer.fit(sentences())
    assert trainer.assembly is not None
    losses = {metrics.step: metrics.loss for metrics in history.steps}
    return losses, weights_sha256(trainer.assembly.engine.spread.full_state())


def interrupted(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    before: tuple[int, dict[str, Any]],
    after: tuple[int, dict[str, Any]],
) -> Outcome:
    monkeypatch.setenv(RUN_DIR, str(tmp_path / "killed"))
    with pytest.raises(WorkerFailure):
        run_ranks(train, before[0], args=(str(tmp_path), SAVED + 4, before[1]))
    outcomes = run_ranks(train, after[0], args=(str(tmp_path), None, after[1]))
    assert min(outcomes[0][0]) == SAVED + 1, "it went on from the checkpoint"
    return outcomes[0]


DDP: dict[str, Any] = {"parallel": {"strategy": "ddp"}}
FSDP: dict[str, Any] = {"parallel": {"strategy": "fsdp"}}
HSDP: dict[str, Any] = {"parallel": {"strategy": "fsdp", "dp_replicate": 2, "dp_shard": 2}}
BITWISE: dict[str, Any] = {"reproducibility": "bitwise"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "changes"),
    [*(pytest.param(n, DDP, marks=pytest.mark.long) for n in (1, 3)), (2, FSDP)],
)
def test_same_layout_same_bits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ranks: int, changes: dict[str, Any]
) -> None:
    whole = run_ranks(train, ranks, args=(str(tmp_path), None, changes))[0]
    resumed = interrupted(monkeypatch, tmp_path, (ranks, changes), (ranks, changes))
    assert resumed[1] == whole[1]
    assert resumed[0] == {step: loss for step, loss in whole[0].items() if step > SAVED}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param((4, FSDP), (2, FSDP), marks=pytest.mark.long),
        pytest.param((2, FSDP), (1, DDP), marks=pytest.mark.long),
        ((2, DDP), (4, HSDP)),
        pytest.param((4, HSDP), (2, DDP), marks=pytest.mark.long),
    ],
    ids=["fsdp4-fsdp2", "fsdp2-one", "ddp2-hsdp4", "hsdp4-ddp2"],
)
def test_another_layout_same_numbers(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    before: tuple[int, dict[str, Any]],
    after: tuple[int, dict[str, Any]],
) -> None:
    whole = run_ranks(train, 1, args=(str(tmp_path), None, DDP))[0][0]
    losses, _ = interrupted(monkeypatch, tmp_path, before, after)
    assert max(abs(losses[s] - whole[s]) / whole[s] for s in losses) < PARITY


@pytest.mark.slow
@pytest.mark.long
def test_what_rank_0_alone_has_written_is_gone_on_from(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    changes = {**FSDP, "save": "full"}
    whole = run_ranks(train, 2, args=(str(tmp_path), None, FSDP))[0]
    assert interrupted(monkeypatch, tmp_path, (2, changes), (2, changes))[1] == whole[1]


@pytest.mark.slow
@pytest.mark.long
def test_bitwise_keeps_the_bits_at_another_world_size(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole = run_ranks(train, 1, args=(str(tmp_path), None, BITWISE))[0]
    assert interrupted(monkeypatch, tmp_path, (2, BITWISE), (3, BITWISE))[1] == whole[1]
