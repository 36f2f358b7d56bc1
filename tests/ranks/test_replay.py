"""A micro-batch computed twice: one flipped bit in one gradient is found, and the rank is named."""

from __future__ import annotations

from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from drivetrain.core.errors import ConfigError, SilentCorruption
from drivetrain.diagnose import divergence
from drivetrain.diagnose.evidence import Evidence
from drivetrain.diagnose.finding import Kind
from drivetrain.testing import run_ranks
from drivetrain.train.keep_loop import prepare
from drivetrain.train.task import Task
from drivetrain.train.trainer import Trainer
from drivetrain.train.watch.replay import Outcome, is_the_models_way
from tests.ranks.small_task import samples, small_task

EVERY = 4


class Flip(torch.autograd.Function):
    """Passes on what it gets; backward flips the lowest bit of one value, in some calls."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: Flaky) -> torch.Tensor:
        ctx.layer = layer
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = gradient.clone()
        if ctx.layer.is_wrong_now():
            gradient.view(torch.int32).view(-1)[0] ^= 1
        return gradient, None


class Flaky(nn.Linear):
    """Its weight's gradient is wrong in these calls, on one rank or (-1) on all."""

    def __init__(self, rank: int, calls: range) -> None:
        super().__init__(8, 3)
        self._rank, self._calls, self._count = rank, calls, 0

    def is_wrong_now(self) -> bool:
        self._count += 1
        rank = dist.get_rank() if dist.is_initialized() else 0
        return self._count in self._calls and self._rank in (rank, -1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight: torch.Tensor = Flip.apply(self.weight, self)  # type: ignore[no-untyped-call]
        return F.linear(x, weight, self.bias)


def flaky_task(rank: int, calls: range) -> Task:
    def model() -> nn.Module:
        layers = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), Flaky(rank, calls)
        return nn.Sequential(*layers)

    return replace(small_task(), model=model)


def settings(folder: str, every: int | None, **more: Any) -> dict[str, Any]:
    return {
        "global_batch_size": 12,
        "micro_batch_size": 3,
        "max_steps": 9,
        "output_dir": folder,
        "checkpoint": {"every_steps": None},
        "record": {"progress": "plain", "sinks": []},
        "sentinel": {"replay_every_steps": every},
        **more,
    }


def train(
    folder: str, rank: int, calls: range, more: dict[str, Any], every: int | None = EVERY
) -> tuple[list[float], str, str]:
    """The losses, what was printed, and what ended the run."""
    trainer = Trainer(flaky_task(rank, calls), settings(folder, every, **more))
    error = ""
    with redirect_stdout(StringIO()) as said:
        try:
            trainer.fit(samples(36))
        except SilentCorruption as found:
            error = str(found)
    losses = [] if trainer.history is None else [step.loss for step in trainer.history.steps]
    return losses, said.getvalue(), error


LAYOUTS: dict[str, dict[str, Any]] = {"ddp": {}, "fsdp": {"parallel": {"strategy": "fsdp"}}}
NEVER = range(0)


def two_ranks(folder: str) -> dict[str, Any]:
    turns = 2  # micro-batches a step on each of two ranks
    at_check = range((EVERY - 1) * turns + 2, (EVERY - 1) * turns + 3)
    found: dict[str, Any] = {}
    for name, more in LAYOUTS.items():
        # one more call in step 2, which is checked, too
        found[name] = train(folder, 1, range(at_check.start + 1, at_check.stop + 1), more)[2]
        found[f"{name} plain"] = train(folder, 1, NEVER, more, every=None)[0]
        found[f"{name} watched"] = train(folder, 1, NEVER, more)[0]
    found["every call"] = train(folder, -1, range(0, 1000, 2), {})
    return found


@pytest.mark.timeout(120)
def test_a_flipped_bit_of_one_rank_is_found_and_a_sound_run_is_left_as_it_is(tmp_path: Any) -> None:
    check(run_ranks(two_ranks, 2, 100, args=(str(tmp_path),)))


def check(by_rank: list[dict[str, Any]]) -> None:
    for found in by_rank:
        for name in ("ddp", "fsdp"):
            assert f"at step {EVERY} rank 1 did not compute the same bits twice" in found[name]
            assert found[f"{name} plain"] == found[f"{name} watched"]
            assert len(found[f"{name} plain"]) == 9
    losses, said, error = by_rank[0]["every call"]
    assert not error
    assert len(losses) == 9
    assert "kernels are not deterministic" in said


def test_one_process(tmp_path: Any) -> None:
    plain, _, _ = train(str(tmp_path), 0, NEVER, {}, every=None)
    watched, said, _ = train(str(tmp_path), 0, NEVER, {})
    assert plain == watched
    assert "replay" not in said
    # steps 1 and 3 take four backwards, step 2 five; the sixth in step 4 is the real pass
    _, _, error = train(str(tmp_path), 0, range(15, 16), {})
    assert "at step 4 rank 0 did not compute the same bits twice" in error
    assert "first in the gradient of 3.weight" in error
    failure = {"error": f"drivetrain.core.errors.SilentCorruption: {error}"}
    finding = divergence.judge(Evidence(1, end={"failures": [failure]}))
    assert finding is not None
    assert (finding.kind, finding.ranks, finding.step) == (Kind.SILENT_CORRUPTION, (0,), 4)
    assert finding.remedy.startswith("the weights were not updated")


def test_who_is_to_blame() -> None:
    same, once, always = Outcome.SAME, Outcome.ONE_DIFFERS, Outcome.ALL_DIFFER
    assert not is_the_models_way([same, once, same], is_first=False)
    assert not is_the_models_way([same, always, same], is_first=True)
    assert is_the_models_way([once, always, same], is_first=False)
    assert is_the_models_way([always], is_first=False)
    assert not is_the_models_way([once], is_first=False)
    assert is_the_models_way([once], is_first=True)


def test_what_cannot_be_computed_twice_is_refused(tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match="your own loop cannot be replayed"):
        prepare(nn.Linear(4, 3), None, samples(), settings(str(tmp_path), EVERY))
    with pytest.raises(
        ConfigError, match="a pipeline has several micro-batches of a step in flight"
    ):
        train(str(tmp_path), 0, NEVER, {"parallel": {"pp": 2}})
    with pytest.raises(ConfigError, match="counts every backward pass as a real one"):
        train(str(tmp_path), 0, NEVER, {"reproducibility": "bitwise"})
