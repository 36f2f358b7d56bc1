"""A schedule of the user's own, on several ranks: the same rates on each, and after a resume."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LinearLR, OneCycleLR, ReduceLROnPlateau, SequentialLR
from torch.utils.data import DataLoader

import drivetrain
from drivetrain import Hook, LRSchedule, Task, Trainer
from drivetrain.core.errors import WorkerFailure
from drivetrain.record import session
from drivetrain.record.session import RUN_DIR
from drivetrain.testing import run_ranks
from tests.gpt_task import GPT, Sentences, collate, gpt_metrics, token_loss
from tests.ranks.training import NUM_VAL, PARITY, largest_deviation, sentences, settings

STEPS = 12
Outcome = tuple[dict[int, float], dict[int, float]]


def decay_groups(model: torch.nn.Module) -> torch.optim.Optimizer:
    """As people write it: by name, on the model itself."""
    decay = [p for n, p in model.named_parameters() if p.dim() >= 2 and "head" not in n]
    rest = [p for n, p in model.named_parameters() if p.dim() < 2 or "head" in n]
    groups: list[dict[str, Any]] = [
        {"params": decay, "weight_decay": 0.1},
        {"params": rest, "weight_decay": 0.0, "lr": 1e-3},
    ]
    return torch.optim.AdamW(groups, lr=3e-3)


def schedule(kind: str, optimizer: torch.optim.Optimizer, total_steps: int | None) -> Any:
    assert total_steps == STEPS
    if kind == "one cycle":
        return OneCycleLR(optimizer, max_lr=[3e-3, 1e-3], total_steps=total_steps)
    if kind == "plateau":  # a falling loss is worse for "max": it falls at each evaluation
        return ReduceLROnPlateau(optimizer, mode="max", patience=0, factor=0.7)
    warm, fall = LinearLR(optimizer, 0.1, total_iters=3), LinearLR(optimizer, 1.0, 0.1, 9)
    return LRSchedule(SequentialLR(optimizer, [warm, fall], milestones=[3]), every="step")


class Kill(Hook):
    def __init__(self, at: int | None) -> None:
        self.at = at

    def on_train_batch_start(self, trainer: Trainer, step: int) -> None:
        assert trainer.assembly is not None
        if step - 1 == self.at and trainer.assembly.world.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def train(folder: str, kind: str, strategy: str, kill_at: int | None = None) -> Outcome:
    config = settings(
        folder,
        max_steps=STEPS,
        optimization={"max_grad_norm": 1.0},
        parallel={"strategy": strategy},
        checkpoint={"every_steps": 3, "asynchronous": False},
        evaluation={"every_steps": 2},
    )
    task = Task(
        GPT,
        token_loss,
        optimizer=decay_groups,
        metrics=gpt_metrics,
        schedule=lambda optimizer, total: schedule(kind, optimizer, total),
    )
    val = DataLoader(Sentences(NUM_VAL), collate_fn=collate)
    history = Trainer(task, config, [Kill(kill_at)]).fit(sentences(), val)
    steps = history.steps
    return {s.step: s.learning_rate for s in steps}, {s.step: s.loss for s in steps}


def held_against(found: Outcome, expected: Outcome, *, is_exact: bool = True) -> None:
    assert len({*expected[0].values()}) > 3, "a schedule that moves"
    if is_exact:
        assert found[0] == {step: expected[0][step] for step in found[0]}
    losses = [expected[1][step] for step in found[1]]
    assert largest_deviation(list(found[1].values()), losses) <= PARITY


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        pytest.param("one cycle", "fsdp", marks=[pytest.mark.slow, pytest.mark.long]),
        pytest.param("plateau", "fsdp", marks=[pytest.mark.slow, pytest.mark.long]),
        pytest.param("plateau", "ddp", marks=[pytest.mark.slow, pytest.mark.long]),
        pytest.param("chain", "ddp", marks=[pytest.mark.slow, pytest.mark.long]),
    ],
)
def test_ranks_set_the_rates_of_one_process_and_find_them_again_at_another_number(
    kind: str, strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = train(str(tmp_path), kind, "ddp")
    for found in run_ranks(train, 2, 120, args=(str(tmp_path), kind, strategy)):
        held_against(found, alone)
    monkeypatch.setenv(RUN_DIR, str(tmp_path / "killed"))
    with pytest.raises(WorkerFailure):
        run_ranks(train, 2, 120, args=(str(tmp_path), kind, strategy, 8))
    resumed = run_ranks(train, 1, 120, args=(str(tmp_path), kind, "ddp"))[0]
    assert min(resumed[0]) == 7
    held_against(resumed, alone)


def rank_by_rank(folder: str) -> None:
    """A script that sets the rate by what its own rank knows."""
    model = GPT()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = settings(
        folder,
        max_steps=6,
        optimization={"lr_scheduler_type": "none"},
        record={"logging_steps": 2, "sinks": []},
    )
    loop = drivetrain.prepare(model, optimizer, sentences(), config)
    for step in loop.steps():
        for batch in step:
            loop.backward(token_loss(loop.model, batch))
        loop.step()
        loop.optimizer.param_groups[0]["lr"] = 0.1 / (1 + torch.distributed.get_rank())


def test_rates_that_differ_between_ranks_are_refused(tmp_path: Path) -> None:
    said = r"learning rate = 0\.05: on rank 1, but 0\.1 on rank 0"
    with pytest.raises(WorkerFailure, match=said):
        run_ranks(rank_by_rank, 2, 120, args=(str(tmp_path),))


def muon_and_adamw(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    """Matrices of the blocks by one, all else by the other."""
    named = list(model.named_parameters())
    hidden = [p for n, p in named if p.ndim == 2 and n.startswith("blocks")]
    rest = [p for n, p in named if not (p.ndim == 2 and n.startswith("blocks"))]
    return [drivetrain.Muon(hidden, lr=0.02), torch.optim.AdamW(rest, lr=3e-3)]


def train_with_two(folder: str, strategy: str, run: str, cut: bool = False) -> list[float]:
    os.environ[RUN_DIR] = f"{folder}/{run}"
    session._opened = 0
    config = settings(
        folder,
        max_steps=6,
        optimization={},
        parallel={"strategy": strategy},
        checkpoint={"every_steps": 3, "asynchronous": False},
    )
    task = Task(GPT, token_loss, optimizer=muon_and_adamw)
    try:
        return Trainer(task, config, [Cut()] if cut else []).fit(sentences()).losses
    except KeyboardInterrupt:
        return []


class Cut(Hook):
    def on_train_batch_start(self, trainer: Trainer, step: int) -> None:
        if step == 5:
            raise KeyboardInterrupt


def two_ways(folder: str) -> tuple[list[float], list[float], list[float]]:
    copies = train_with_two(folder, "ddp", "copies")
    shards = train_with_two(folder, "fsdp", "shards")
    train_with_two(folder, "fsdp", "cut", cut=True)
    return copies, shards, train_with_two(folder, "fsdp", "cut")


@pytest.mark.slow
@pytest.mark.long
def test_two_optimizers_train_on_copies_and_shards(tmp_path: Path) -> None:
    alone = run_ranks(train_with_two, 1, 120, args=(str(tmp_path), "ddp", "alone"))[0]
    for copies, shards, resumed in run_ranks(two_ways, 2, 200, args=(str(tmp_path),)):
        assert largest_deviation(copies, alone) <= PARITY
        assert largest_deviation(shards, alone) <= PARITY
        assert resumed == shards[3:], "to the last bit"
