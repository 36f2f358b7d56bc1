"""A loop of one's own gives Trainer's numbers."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import drivetrain
from drivetrain.core.errors import NonFiniteLoss
from drivetrain.record.reading import open_run
from drivetrain.record.step_file import SECONDS
from drivetrain.testing import run_ranks
from drivetrain.train.keep_loop import KeptLoop
from drivetrain.train.saving.weights import read_weights, weights_sha256
from tests.gpt_task import GPT, Sentences, collate, gpt_metrics, token_loss
from tests.ranks.training import (
    assert_same_training,
    sentences,
    settings,
    train_gpt,
)


def own_loop(output_dir: str, strategy: str = "ddp") -> list[float]:
    config = settings(output_dir, max_steps=12, parallel={"strategy": strategy})
    loop = drivetrain.prepare(GPT, None, sentences(), config)
    for step in loop.steps():
        for batch in step:
            loop.backward(token_loss(loop.model, batch))
        loop.step()
    whole = loop.full_state_dict()
    if loop.is_main and loop.history.run_dir is not None:
        found = read_weights(loop.history.run_dir / "checkpoints")
        assert weights_sha256(found) == weights_sha256(whole), "what Trainer leaves, too"
    return loop.history.losses


def both_strategies(output_dir: str) -> list[list[float]]:
    return [own_loop(output_dir), own_loop(output_dir, "fsdp")]


def test_the_numbers_are_the_trainers(tmp_path: Path) -> None:
    expected = train_gpt(str(tmp_path), max_steps=12)[0]
    assert own_loop(str(tmp_path)) == expected
    for losses in run_ranks(both_strategies, 2, 120, args=(str(tmp_path),)):
        assert_same_training(losses[0], expected)
        assert_same_training(losses[1], expected)


def given_model_and_optimizer(output_dir: str) -> tuple[list[float], dict[str, float]]:
    torch.manual_seed(torch.distributed.get_rank() if torch.distributed.is_initialized() else 0)
    model = GPT()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    config = settings(output_dir, max_steps=6, parallel={"strategy": "fsdp"})
    del config["optimization"]["learning_rate"]  # the optimizer has its own
    loop = drivetrain.prepare(model, optimizer, sentences(), config)
    for step in loop.steps():
        for batch in step:
            loop.backward(token_loss(loop.model, batch))
        loop.step()
    val: Any = torch.utils.data.DataLoader(Sentences(17), collate_fn=collate)
    result = loop.evaluate(val, gpt_metrics)
    assert result.num_samples == 17
    return loop.history.losses, dict(result.metrics)


def test_a_model_and_an_optimizer_that_exist_are_spread(tmp_path: Path) -> None:
    """Ranks made different weights; all start from rank 0's."""
    expected, metrics = given_model_and_optimizer(str(tmp_path))
    for losses, theirs in run_ranks(given_model_and_optimizer, 2, 120, args=(str(tmp_path),)):
        assert_same_training(losses, expected)
        assert theirs["loss"] == pytest.approx(metrics["loss"], rel=1e-5)


def test_forgetting_a_call_is_said(tmp_path: Path) -> None:
    config = settings(str(tmp_path), max_steps=5)
    loop = drivetrain.prepare(GPT, None, sentences(), config)
    answer = (
        r"loop\.backward\(loss\) was not called for this micro-batch: `continue` or a branch "
        r"skipped it, or loss\.backward\(\) or .*; call it once for every micro-batch"
    )
    with pytest.raises(RuntimeError, match=answer):
        for step in loop.steps():
            for batch in step:
                torch.autograd.backward(token_loss(loop.model, batch).sum)
    loop = drivetrain.prepare(GPT, None, sentences(), config)
    with pytest.raises(RuntimeError, match="step\\(\\) was not called"):
        for step in loop.steps():
            for batch in step:
                loop.backward(token_loss(loop.model, batch))
    loop = drivetrain.prepare(GPT, None, sentences(), config)
    with pytest.raises(RuntimeError, match="before all of the step's batches were used"):
        for step in loop.steps():
            loop.backward(token_loss(loop.model, next(step)))
            loop.step()
    other = torch.optim.SGD(GPT().parameters(), lr=0.1)
    with pytest.raises(drivetrain.ConfigError, match="parameters that are not the model's"):
        drivetrain.prepare(GPT(), other, sentences(), config)


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("before", "call backward() inside `for batch in step`, once per batch"),
        (
            "inside",
            "loop.backward(loss) was called twice for this micro-batch: sum the losses and ",
        ),
        ("after", "call backward() inside `for batch in step`, once per batch"),
    ],
)
def test_a_backward_too_many_is_said(tmp_path: Path, where: str, said: str) -> None:
    def another(at: str) -> None:
        if at == where:
            loop.backward(torch.ones(()))

    loop = drivetrain.prepare(GPT, None, sentences(), settings(str(tmp_path), max_steps=5))
    with pytest.raises(RuntimeError, match=re.escape(said)):
        for step in loop.steps():
            if loop.step_number:
                another("before")
            for batch in step:
                loop.backward(token_loss(loop.model, batch))
                another("inside")
            another("after")
            loop.step()


def test_a_loop_that_is_left_early_has_its_last_step_written_down(tmp_path: Path) -> None:
    loop = drivetrain.prepare(GPT, None, sentences(), settings(str(tmp_path), max_steps=5))
    for number, step in enumerate(loop.steps(), 1):
        for batch in step:
            loop.backward(token_loss(loop.model, batch))
        loop.step()
        if number == 3:
            break
    assert loop.history.run_dir is not None
    assert list(open_run(loop.history.run_dir).steps(0)["step"]) == [1, 2, 3]


def kept(tmp_path: Path, **changes: Any) -> KeptLoop:
    config = settings(str(tmp_path), max_steps=4, optimization={"max_grad_norm": 1.0}, **changes)
    return drivetrain.prepare(GPT, None, sentences(), config)


def train(loop: KeptLoop, val: Any = None, stop_after: int = 99) -> None:
    for number, step in enumerate(loop.steps(), 1):
        for batch in step:
            loop.backward(token_loss(loop.model, batch))
        loop.step()
        if val is not None:
            loop.evaluate(val, gpt_metrics)
        if number == stop_after:
            break


def happened(loop: KeptLoop) -> list[str]:
    assert loop.history.run_dir is not None
    return [e.name for e in open_run(loop.history.run_dir).events(0) if e.kind == "instant"]


def test_how_it_ended_is_written_down(tmp_path: Path) -> None:
    loop = kept(tmp_path)
    train(loop)
    assert happened(loop)[0] == "attempt"
    assert happened(loop)[-1] == "run_end"
    loop = kept(tmp_path)
    train(loop, stop_after=2)
    assert happened(loop)[-1] == "run_end"
    loop = kept(tmp_path)
    with pytest.raises(ZeroDivisionError):
        for step in loop.steps():
            next(step)
            raise ZeroDivisionError
    assert happened(loop)[-1] == "run_failed"


def test_evaluations_are_recorded_before_during_and_after_the_loop(tmp_path: Path) -> None:
    val: Any = torch.utils.data.DataLoader(Sentences(17), collate_fn=collate)
    loop = kept(tmp_path)
    loop.evaluate(val, gpt_metrics)
    train(loop, val)
    loop.evaluate(val, gpt_metrics)
    assert loop.history.run_dir is not None
    run = open_run(loop.history.run_dir)
    events = [e for e in run.events(0) if e.kind == "scalars" and "val/loss" in e.values]
    assert [e.step for e in events] == [0, 1, 2, 3, 4, 4]
    assert happened(loop)[-1] == "run_end"


@pytest.mark.parametrize("logging_steps", [1, 2])
def test_an_evaluation_at_the_logging_step_leaves_the_rate_as_it_is(
    tmp_path: Path, logging_steps: int
) -> None:
    """Its end was taken for the beginning of the steps before it."""
    val: Any = torch.utils.data.DataLoader(Sentences(17), collate_fn=collate)

    def slow_metrics(model: Any, batch: Any) -> Any:
        time.sleep(0.1)  # 5 times in an evaluation: counted with the steps it would show
        return gpt_metrics(model, batch)

    loop = kept(tmp_path, record={"progress": "none", "logging_steps": logging_steps})
    for number, step in enumerate(loop.steps(), 1):
        for batch in step:
            loop.backward(token_loss(loop.model, batch))
            time.sleep(0.02)
        loop.step()
        if number % 2 == 0:
            loop.evaluate(val, slow_metrics)
    assert loop.history.run_dir is not None
    run = open_run(loop.history.run_dir)
    rates = list(run.scalars()["throughput/samples_per_sec"].values)
    steps = run.steps(0)
    taken_s = np.sum([steps[part] for part in SECONDS[:4]], axis=0)  # up to the moved weights
    expected = 24 * logging_steps / taken_s.reshape(-1, logging_steps).sum(axis=1)
    # what lies between two steps is in the rates alone: a busy machine may make much of it
    assert all(0.2 < rate / true < 2 for rate, true in zip(rates, expected, strict=True))


def test_a_loss_that_is_no_number_never_reaches_the_weights(tmp_path: Path) -> None:
    loop = kept(tmp_path)
    with pytest.raises(NonFiniteLoss, match="nan at step 2 on rank 0"):
        for number, step in enumerate(loop.steps(), 1):
            for batch in step:
                loss = token_loss(loop.model, batch)
                factor = float("nan") if number == 2 else 1.0
                loop.backward(drivetrain.Total(loss.sum * factor, loss.count))
            loop.step()
    assert all(p.isfinite().all() for p in loop.model.parameters())


def test_live_replicas_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(drivetrain.ConfigError, match=r"fault_tolerance = live: .*use Trainer"):
        kept(tmp_path, fault_tolerance="live")
    monkeypatch.setenv("DRIVETRAIN_LIVE", "1")
    with pytest.raises(drivetrain.ConfigError, match=r"fault_tolerance = live: .*use Trainer"):
        kept(tmp_path)
