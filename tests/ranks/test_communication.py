"""Gradient compression: what it may change, what it must keep, and what auto makes of it."""

from __future__ import annotations

import inspect
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from torch._C._distributed_c10d import GradBucket

from drivetrain.config.schema import Communication
from drivetrain.config.schema import TopK as TopKConfig
from drivetrain.strategies.ddp.communication import OnTheWire, Trial, _Sample, begins_at_once
from drivetrain.strategies.ddp.compression import (
    BFloat16,
    Compressor,
    Mean,
    Plain,
    TopKCompressor,
    _hook,
)
from drivetrain.testing import run_ranks
from drivetrain.train.task import Task
from drivetrain.train.trainer import Trainer
from tests.gpt_task import gpt_task
from tests.ranks.test_resume import interrupted, train
from tests.ranks.training import (
    assert_same_training,
    largest_deviation,
    sentences,
    settings,
    train_gpt,
)

STEPS = 20
# Every gradient is compressed, and nothing of it is lost: only the way differs from plain ddp.
WHOLE: dict[str, dict[str, Any]] = {
    "topk": {"compression": "topk", "topk": {"ratio": 1.0}},
    "powersgd": {
        "compression": "powersgd",
        "powersgd": {"rank": 1000, "start_step": 2, "min_compression_rate": 0},
    },
}


def sgd_task() -> Task:
    """Plain SGD: Adam would make a full step of what rounding leaves of a zero."""
    return replace(
        gpt_task(),
        optimizer=lambda parameters, optimization: torch.optim.SGD(
            parameters, lr=optimization.learning_rate
        ),
    )


def train_sgd(output_dir: str, **changes: Any) -> list[float]:
    optimization = {"learning_rate": 0.3, "max_grad_norm": 1.0}
    config = settings(output_dir, max_steps=STEPS, optimization=optimization, **changes)
    return Trainer(sgd_task(), config).fit(sentences()).losses


def train_whole(output_dir: str) -> dict[str, list[float]]:
    plain = {"plain": train_sgd(output_dir)}
    return plain | {name: train_sgd(output_dir, communication=c) for name, c in WHOLE.items()}


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.long
def test_compressors_that_keep_everything_train_what_ddp_trains(
    world_size: int, tmp_path: Path
) -> None:
    for losses in run_ranks(train_whole, world_size, 500, args=(str(tmp_path),)):
        assert losses["plain"][-1] < losses["plain"][0] - 0.1
        for name in WHOLE:
            assert_same_training(losses[name], losses["plain"])


def train_in_16_bits(output_dir: str) -> dict[str, list[float]]:
    return {
        name: train_gpt(output_dir, max_steps=STEPS, communication={"compression": name})[0]
        for name in ("none", "fp16", "bf16")
    }


@pytest.mark.slow
@pytest.mark.long
def test_16_bits_on_the_wire_stay_close(tmp_path: Path) -> None:
    for losses in run_ranks(train_in_16_bits, 2, 120, args=(str(tmp_path),)):
        # Relative, over 20 steps of AdamW: gradients are rounded to 11 and to 8 bits of mantissa.
        assert 0 < largest_deviation(losses["fp16"], losses["none"]) < 1e-3
        assert 0 < largest_deviation(losses["bf16"], losses["none"]) < 1e-2


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    "communication",
    [
        {"compression": "topk", "topk": {"ratio": 0.05}},
        {"compression": "powersgd", "powersgd": {"rank": 2, "start_step": 4}},
    ],
    ids=["topk", "powersgd"],
)
def test_what_was_kept_back_is_gone_on_with(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, communication: dict[str, Any]
) -> None:
    changes = {"communication": communication}
    whole = run_ranks(train, 2, args=(str(tmp_path), None, changes))[0]
    assert whole[0][60] < whole[0][1]
    assert interrupted(monkeypatch, tmp_path, (2, changes), (2, changes))[1] == whole[1]


def send_three_times(ratio: float) -> tuple[list[float], list[float]]:
    """What all ranks have received, and what this one had to send and still has."""
    torch.manual_seed(dist.get_rank())
    group = dist.group.WORLD
    assert group is not None
    compressor = TopKCompressor(TopKConfig(ratio=ratio), group)
    received, sent = torch.zeros(64), torch.zeros(64)
    for _ in range(3):
        gradient = torch.randn(8, 8)
        sent += gradient.view(-1)
        bucket: Any = _Sample(gradient)
        received += compressor.exchange(bucket).wait()
    gone = sent - compressor.state_dict()["kept_back"][0]
    return received.tolist(), gone.tolist()


def test_topk_loses_nothing() -> None:
    outcomes = run_ranks(send_three_times, 3, 60, args=(0.1,))
    mean = torch.tensor([gone for _, gone in outcomes]).mean(0)
    for received, _ in outcomes:
        torch.testing.assert_close(torch.tensor(received), mean)
        assert received == outcomes[0][0], "every rank has the same bits"


class Slow(Plain):
    """A wire on which plain gradients take long."""

    def exchange(self, bucket: GradBucket) -> Mean:
        time.sleep(0.02)
        return super().exchange(bucket)


class SlowHalf(BFloat16):
    def exchange(self, bucket: GradBucket) -> Mean:
        time.sleep(0.02)
        return super().exchange(bucket)


def try_both() -> list[tuple[str, str]]:
    group = dist.group.WORLD
    assert group is not None
    settled: list[tuple[str, str]] = []
    pairs: list[tuple[Plain, Compressor]] = [
        (Slow(group), BFloat16(group)),
        (Plain(group), SlowHalf(group)),
    ]
    for plain, candidate in pairs:
        trial = Trial(plain, candidate, 0.0, torch.device("cpu"))
        trial.when_settled = lambda name, why: settled.append((name, why))
        for _ in range(20):
            bucket: Any = _Sample(torch.ones(8, 8))
            trial.exchange(bucket).wait()
        again = Trial(plain, candidate, 0.0, torch.device("cpu"))
        again.load_state_dict(trial.state_dict())
        assert again.state_dict()["choice"] == settled[-1][0]
    return settled


def test_a_trial_ends_with_the_shorter_steps_on_all_ranks() -> None:
    outcomes = run_ranks(try_both, 2, 60)
    assert [name for name, _ in outcomes[0]] == ["bf16", "none"]
    assert outcomes[0] == outcomes[1], "the same decision, from the same figures"


class Uneven(Plain):
    """Slow on one rank alone, so that the others would decide otherwise by themselves."""

    def exchange(self, bucket: GradBucket) -> Mean:
        if dist.get_rank() == 1:
            time.sleep(0.1)
        return super().exchange(bucket)


def count_steps_on_trial() -> tuple[int, str]:
    group = dist.group.WORLD
    assert group is not None
    trial = Trial(Uneven(group), BFloat16(group), 0.1, torch.device("cpu"))
    settled: list[str] = []
    trial.when_settled = lambda name, why: settled.append(f"{name}, {why}")
    num_steps = 0
    while not settled:
        bucket: Any = _Sample(torch.ones(8, 8))
        trial.exchange(bucket)  # not waited for: only rank 1's own clock shows the wait
        num_steps += not settled
    return num_steps, settled[0]


def test_ranks_whose_clocks_differ_decide_at_the_same_step() -> None:
    first, second = run_ranks(count_steps_on_trial, 2, 60)
    assert first == second
    assert first[1].startswith("bf16, "), "rank 1's 100 ms, on rank 0 too"


def exchange_thrice() -> bool:
    group = dist.group.WORLD
    assert group is not None
    powersgd = begins_at_once("powersgd", Communication(), group)
    matrix = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        bucket: Any = _Sample(matrix.clone())
        mean = powersgd.exchange(bucket).wait()
    return torch.allclose(mean, matrix.view(-1))


def test_a_trial_of_powersgd_sees_it_at_work() -> None:
    assert run_ranks(exchange_thrice, 2, 60) == [False, False], "compressed by the third step"


@pytest.mark.parametrize(
    ("seconds", "best"),
    [
        ({"none": 2.0, "bf16": 1.1, "fp16": 1.0}, "fp16"),
        ({"none": 2.0, "bf16": 1.01, "fp16": 1.0}, "bf16"),  # as fast: the first allowed
        ({"none": 2.0, "bf16": 1.9, "fp16": 1.7}, "none"),  # not worth a trial
        ({"none": 0.001, "bf16": 0.0001}, "none"),  # nothing to gain
        ({"none": 2.0}, "none"),  # nothing allowed
    ],
)
def test_only_what_is_much_faster_on_the_wire_is_tried(
    seconds: dict[str, float], best: str
) -> None:
    assert OnTheWire(seconds).best() == best


def train_on_auto(output_dir: str) -> tuple[str, str]:
    # without a candidate: on a busy machine the sample alone may look worth a trial
    communication = {"compression": "auto", "allow": []}
    config = settings(output_dir, max_steps=6, communication=communication)
    trainer = Trainer(gpt_task(), config)
    trainer.fit(sentences())
    assert trainer.run_dir is not None
    document = yaml.safe_load((trainer.run_dir / "run.yaml").read_text())
    key = "communication.compression"
    return document["config"]["communication"]["compression"], document["sources"][key]


def test_auto_declines_where_there_is_nothing_to_gain_and_says_why(tmp_path: Path) -> None:
    for chosen, source in run_ranks(train_on_auto, 2, 60, args=(str(tmp_path),)):
        assert chosen == "none"
        assert source.startswith("chosen: exchanging the gradients would take: plain ")


def test_auto_allows_only_what_keeps_the_numbers() -> None:
    assert set(Communication().allow) == {"bf16", "fp16"}


def test_torch_takes_the_hook_for_what_it_is() -> None:
    """DDP compares its annotations with its own types, and refuses their names."""
    hook = inspect.signature(_hook)
    assert hook.parameters["bucket"].annotation is GradBucket
    assert hook.return_annotation == torch.futures.Future[torch.Tensor]
