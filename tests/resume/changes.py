"""What may be changed between two attempts of a run, and what happens then."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from drivetrain.checkpoint.catalogue import entries
from drivetrain.checkpoint.storage import storage_at
from drivetrain.config.schema import Optimization
from drivetrain.core.errors import ConfigError, WorkerFailure
from drivetrain.record.run_directory import RunDirectory
from drivetrain.testing import run_ranks
from tests.resume.training import HALF, WHOLE, Setup, train

PARITY = 1e-5
Happens = Literal["resumed exactly", "resumed, and reported", "refused", "resumed once accepted"]


_USUAL = Setup()


@dataclass(frozen=True)
class Change:
    """One row of the table: what is changed, and the key it is accepted by (empty: by none)."""

    what: str
    after: Setup
    happens: Happens
    accept: str = ""
    before: Setup = _USUAL

    @property
    def num_ranks(self) -> int:
        """Processes it needs."""
        return max(self.before.num_ranks, self.after.num_ranks)


@dataclass(frozen=True)
class Seen:
    """What came of it."""

    happens: Happens
    message: str = ""


def observe(change: Change, folder: Path) -> Seen:
    """Train half, change it, go on; and the same without a break, to compare with."""
    whole = _train(change.before, folder / "whole", WHOLE)
    run = folder / "run"
    _train(change.before, run, HALF)
    kept = _good(run)
    try:
        losses = _train(change.after, run, WHOLE)
    except (ConfigError, WorkerFailure) as error:
        assert _good(run) == kept, "a refusal leaves every checkpoint where it is"
        message = _first_line(error)
        if not change.accept:
            return Seen("refused", message)
        _train(change.after, run, WHOLE, (change.accept,))
        return Seen("resumed once accepted", message)
    noted = [line for line in _noted(run) if '"refused"' not in line]
    if not all(abs(a - b) <= PARITY for a, b in zip(losses, whole[HALF:], strict=True)):
        assert noted, "numbers differ, and nothing was said"
    return Seen("resumed, and reported" if noted else "resumed exactly", _said(run))


def _first_line(error: Exception) -> str:
    """The message; a rank's has a traceback before it."""
    lines = str(error).strip().splitlines()
    if isinstance(error, ConfigError):
        return lines[0]
    return lines[-1].partition("ContractChanged: ")[2]


def _train(setup: Setup, run: Path, steps: int, accepted: tuple[str, ...] = ()) -> list[float]:
    if setup.num_ranks == 1:
        return train(setup, run, steps, accepted)
    losses: list[float] = run_ranks(train, setup.num_ranks, args=(setup, run, steps, accepted))[0]
    return losses


def _good(run: Path) -> list[str]:
    return [e.folder for e in entries(storage_at(str(RunDirectory(run).checkpoints))) if e.manifest]


def _noted(run: Path) -> list[str]:
    path = run / "changes.jsonl"
    return path.read_text().splitlines() if path.is_file() else []


def _said(run: Path) -> str:
    changes = [json.loads(line) for line in _noted(run)]
    return "; ".join(f"{c['key']}: {c['before']} → {c['now']}" for c in changes)


def _sgd(parameters: Iterable[nn.Parameter], rule: Optimization) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=rule.learning_rate, momentum=0.9)


def _heavier(parameters: Iterable[nn.Parameter], rule: Optimization) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=rule.learning_rate, momentum=0.5)


def _smaller() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 2))


def _larger() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 2), nn.Linear(2, 2))


def _wider() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.1), nn.Linear(16, 2))


def _drops_more() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))


def _double() -> nn.Module:
    return Setup().model().double()


def _config(**values: Any) -> Setup:
    return Setup(config=values)


_COSINE = {"lr_scheduler_type": "cosine"}
_TWO = Setup(num_ranks=2)

CHANGES = (
    Change("nothing", Setup(), "resumed exactly"),
    Change("`seed`", _config(seed=7), "resumed once accepted", "seed"),
    Change(
        "`data.shuffle`",
        _config(data={"shuffle": False}),
        "resumed once accepted",
        "data.shuffle",
    ),
    Change(
        "`global_batch_size`",
        _config(global_batch_size=4),
        "resumed once accepted",
        "global_batch_size",
    ),
    Change("`micro_batch_size`", _config(micro_batch_size=2), "resumed, and reported"),
    Change("length of the data", Setup(length=20), "resumed once accepted", "data.length"),
    Change("content of the data", Setup(shift=1.0), "resumed once accepted", "data.content"),
    Change(
        "`optimization.learning_rate`",
        _config(optimization={"learning_rate": 0.1}),
        "resumed once accepted",
        "optimization.learning_rate",
    ),
    Change(
        "`max_steps`, with a constant rate",
        _config(max_steps=WHOLE),
        "resumed exactly",
    ),
    Change(
        "shape of the schedule",
        _config(optimization={"lr_scheduler_type": "linear"}),
        "resumed once accepted",
        "optimization.lr_scheduler_type",
        before=_config(optimization=_COSINE, max_steps=WHOLE),
    ),
    Change(
        "class of the optimizer", Setup(optimizer=_sgd), "resumed once accepted", "optimizer.class"
    ),
    Change(
        "settings of the optimizer",
        Setup(optimizer=_heavier),
        "resumed once accepted",
        "optimizer.momentum",
        before=Setup(optimizer=_sgd),
    ),
    Change("model with fewer layers", Setup(model=_smaller), "refused"),
    Change("model with more layers", Setup(model=_larger), "refused"),
    Change("model with wider layers", Setup(model=_wider), "refused"),
    Change("dtype of the weights", Setup(model=_double), "refused"),
    Change(
        "dropout, activations: modules without weights",
        Setup(model=_drops_more),
        "resumed once accepted",
        "model.modules",
    ),
    Change(
        "`precision.dtype`",
        _config(precision={"dtype": "bf16"}),
        "resumed once accepted",
        "precision.dtype",
    ),
    Change(
        "`reproducibility`",
        _config(reproducibility="bitwise"),
        "resumed once accepted",
        "reproducibility",
    ),
    Change("version of torch", Setup(torch="2.14.0"), "resumed, and reported"),
    Change("two ranks to one", Setup(), "resumed, and reported", before=_TWO),
    Change("one rank to two", _TWO, "resumed, and reported"),
    Change(
        "`ddp` to `fsdp`",
        replace(_TWO, config={"parallel": {"strategy": "fsdp"}}),
        "resumed, and reported",
        before=_TWO,
    ),
    Change(
        "`ddp` to `local_sgd`",
        replace(_TWO, config={"parallel": {"strategy": "local_sgd"}}),
        "resumed once accepted",
        "parallel.strategy",
        before=_TWO,
    ),
)
