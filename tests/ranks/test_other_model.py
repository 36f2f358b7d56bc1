"""Ranks that have made different models are told which tensor differs, before the first step."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from drivetrain import ConfigError, Task, Trainer, prepare
from drivetrain.testing import run_ranks
from tests.unit.test_misused_task import data, mean


class Another(nn.Module):
    """Its second layer is as wide as the rank is high."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        rank = int(os.environ["RANK"])
        self.a = nn.Linear(4, 2)
        self.b = nn.Linear(2, {"shape": 2 + rank, "smaller": 64 - 8 * rank}.get(kind, 2))
        if kind == "more" and rank == 1:
            self.c = nn.Linear(2, 2)
        if kind == "frozen" and rank == 1:
            self.a.bias.requires_grad_(False)

    def forward(self, x: Any) -> Any:
        return self.b(self.a(x))[:, :2]


class Loaded(nn.Linear):
    """Only rank 0 has read its weights."""

    def __init__(self) -> None:
        super().__init__(4, 2)
        if not dist.is_initialized() or dist.get_rank() == 0:
            nn.init.constant_(self.weight, 0.25)


def settings(output_dir: str, strategy: str) -> dict[str, Any]:
    return {
        "output_dir": output_dir,
        "global_batch_size": 8,
        "micro_batch_size": 4,
        "max_steps": 2,
        "parallel": {"strategy": strategy},
        "record": {"progress": "plain", "sinks": []},
    }


def trained(output_dir: str, strategy: str) -> tuple[list[float], tuple[str, ...]]:
    """Its losses, and what was said before the first step."""
    trainer = Trainer(Task(model=Loaded, loss=mean), settings(output_dir, strategy))
    losses = trainer.fit(data()).losses
    assert trainer.assembly is not None
    return losses, trainer.assembly.notes


def trained_both_ways(output_dir: str) -> list[tuple[list[float], tuple[str, ...]]]:
    return [trained(output_dir, strategy) for strategy in ("ddp", "fsdp")]


def test_weights_that_only_rank_0_has_loaded_are_everybodys(tmp_path: Path) -> None:
    expected, alone = trained(str(tmp_path), "ddp")
    assert not [note for note in alone if "differs from rank 0" in note]
    said = "model: weight on rank 1 differs from rank 0; all ranks start from rank 0's values"
    for of_rank in run_ranks(trained_both_ways, 2, 120, args=(str(tmp_path),)):
        for losses, notes in of_rank:
            assert losses == pytest.approx(expected, rel=1e-5)  # sums in another order
            assert said in notes


def prepared(output_dir: str) -> list[tuple[str, ...]]:
    """What is said of modules that each rank has made: unseeded, then seeded."""
    found = []
    for seed in (int(os.environ["RANK"]), 0):
        torch.manual_seed(seed)
        loop = prepare(nn.Linear(4, 2), None, data(), settings(output_dir, "ddp"))
        found.append(tuple(n for n in loop.assembly.notes if "differs from rank 0" in n))
    return found


def test_a_module_that_each_rank_has_drawn_is_reported(tmp_path: Path) -> None:
    said = (
        "model: weight on rank 1 differs from rank 0; all ranks start from rank 0's values; if "
        "they are drawn at random, call torch.manual_seed(…) before creating the model, so that "
        "every start begins alike"
    )
    for unseeded, seeded in run_ranks(prepared, 2, 120, args=(str(tmp_path),)):
        assert unseeded == (said,)
        assert seeded == ()


def refused(output_dir: str) -> dict[str, str]:
    found = {}
    samples: TensorDataset = data()
    for strategy in ("ddp", "fsdp"):
        for kind in ("shape", "more", "frozen"):
            config = settings(output_dir, strategy)
            try:
                Trainer(Task(model=lambda kind=kind: Another(kind), loss=mean), config).fit(samples)  # type: ignore[misc]
            except ConfigError as error:
                found[f"{strategy} {kind}"] = str(error)
    try:
        prepare(Another("smaller"), None, samples, settings(output_dir, "ddp"))
    except ConfigError as error:
        found["prepare"] = str(error)
    return found


def test_what_differs_is_named_on_every_rank(tmp_path: Path) -> None:
    answers = run_ranks(refused, 2, 120, args=(str(tmp_path),))
    assert answers[0] == answers[1]
    assert "b.weight = (56, 2) float32, trained: on rank 1" in answers[0]["prepare"]
    for strategy in ("ddp", "fsdp"):
        shape, more, frozen = (answers[0][f"{strategy} {k}"] for k in ("shape", "more", "frozen"))
        assert (
            "b.weight = (3, 2) float32, trained: on rank 1, but (2, 2) float32, trained on rank 0; "
            "build the same model on every rank" in shape
        )
        assert "c.weight = (2, 2) float32, trained: on rank 1, but missing on rank 0" in more
        assert "a.bias = (2,) float32: on rank 1, but (2,) float32, trained on rank 0" in frozen
