"""Every layout trains on the device what the CPU trains, and no step waits for the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.testing import run_ranks
from drivetrain.train.hooks import Hook
from drivetrain.train.keep_loop import prepare
from drivetrain.train.trainer import Trainer
from tests.accelerator.layouts import GROUPS, STEPS, train_on_device
from tests.accelerator.reference import losses_on_cpu
from tests.gpt_task import GPT, token_loss
from tests.ranks.matrix import LAYOUTS, config
from tests.ranks.models import task_of
from tests.ranks.test_gather import train as train_gathered
from tests.ranks.training import largest_deviation, sentences, settings, train_gpt

PARITY = 1e-5
CORE = {2: ["ddp", "fsdp", "tp", "cp", "pp 1f1b"], 4: ["hsdp", "fsdp×tp", "fsdp×pp"]}
"""What CI trains; `make device-matrix` trains all."""


@pytest.mark.parametrize(
    ("group", "shift", "world_size"),
    [
        ("both", 0, 2),
        pytest.param("both", 0, 4, marks=pytest.mark.long),
        pytest.param("device only", 3, 2, marks=pytest.mark.long),
        ("device only", 3, 4),
    ],
)
def test_layouts_train_what_the_cpu_trains(
    tmp_path: Path, world_size: int, group: str, shift: int
) -> None:
    cells = [(layout, "gpt") for layout in CORE[world_size]]
    found = run_ranks(
        train_on_device, world_size, 500, (str(tmp_path), cells, shift), GROUPS[group]
    )[0]
    reference = losses_on_cpu("gpt", STEPS)
    assert {name: largest_deviation(losses, reference) for name, losses in found.items()} == {
        name: pytest.approx(0.0, abs=PARITY) for name in found
    }


def test_a_model_with_convolutions_and_running_statistics(tmp_path: Path) -> None:
    cells = [(layout, "resnet") for layout in ("ddp", "fsdp")]
    found = run_ranks(train_on_device, 2, 500, (str(tmp_path), cells, 0), GROUPS["both"])[0]
    for name, losses in found.items():
        assert largest_deviation(losses, losses_on_cpu("resnet", STEPS)) <= PARITY, name


def test_experts_on_two_devices(tmp_path: Path) -> None:
    cells = [("ep", "moe")]
    found = run_ranks(train_on_device, 2, 500, (str(tmp_path), cells, 3), GROUPS["device only"])[0]
    assert largest_deviation(found["ep, moe"], losses_on_cpu("moe", STEPS)) <= PARITY


class Synchronizations(Hook):
    """Counts the host's waits from the third step to the seventh, which none of them logs."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_start(self, trainer: Trainer, step: int) -> None:
        if step == 4:
            self._watch = torch.get_device_module("sim").watching_synchronizations()
            self.seen = self._watch.__enter__()

    def on_train_batch_end(self, trainer: Trainer, step: int) -> None:
        if step == 8:
            self._watch.__exit__(None, None, None)


def synchronizations(output_dir: str, layouts: list[str]) -> dict[str, list[str]]:
    """By layout: what made the host wait in five steps, and where."""
    found = {}
    for layout in layouts:
        task, data = task_of("gpt")
        chosen = config(output_dir, 9, LAYOUTS[layout][1] if layout in LAYOUTS else {})
        chosen["record"] = {"progress": "none", "sinks": [], "logging_steps": 100}
        hook = Synchronizations()
        Trainer(task, chosen, hooks=[hook]).fit(data)
        found[layout] = [f"{cause} at {where}" for cause, where in hook.seen]
    return found


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(4, marks=pytest.mark.long)])
def test_no_step_waits_for_the_device(tmp_path: Path, world_size: int) -> None:
    layouts = CORE.get(world_size, ["one rank"])
    for found in run_ranks(
        synchronizations, world_size, 500, (str(tmp_path), layouts), GROUPS["both"]
    ):
        assert found == {layout: [] for layout in layouts}


def hashes(output_dir: str) -> str:
    """With dropout, clipping, samples of different lengths, a short last batch."""
    return train_gpt(output_dir, with_hash=True, reproducibility="bitwise", max_steps=8)[2]


def test_bitwise_gives_the_same_bits_at_any_number_of_devices(tmp_path: Path) -> None:
    found = {
        run_ranks(hashes, world_size, 500, (str(tmp_path),), GROUPS["both"])[0]
        for world_size in (1, 2, 4)
    }
    assert len(found) == 1


def offloaded(output_dir: str) -> list[float]:
    """Weights, gradients and optimizer on the host; the loss counts tokens on the device."""
    more: dict[str, Any] = {
        "parallel": {"strategy": "fsdp"},
        "memory": {"offload": "cpu"},
        "max_steps": 5,
    }
    return train_gpt(output_dir, **more)[0]


def test_fsdp_offloaded_to_the_host_with_a_loss_that_counts(tmp_path: Path) -> None:
    two = run_ranks(offloaded, 2, args=(str(tmp_path),), backend=GROUPS["both"])[0]
    one = run_ranks(on_one_rank, 1, args=(str(tmp_path),), backend=GROUPS["both"])[0]
    assert largest_deviation(two, one) <= PARITY


def on_one_rank(output_dir: str) -> list[float]:
    return train_gpt(output_dir, max_steps=5)[0]


def kept_loop(output_dir: str) -> list[float]:
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loop = prepare(model, optimizer, sentences(), settings(output_dir, max_steps=6))
    for step in loop.steps():
        for batch in step:
            loop.backward(token_loss(loop.model, batch))
        loop.step()
    return loop.history.losses


def test_a_loop_of_ones_own_in_a_group_that_takes_no_host_tensors(tmp_path: Path) -> None:
    losses = run_ranks(kept_loop, 2, args=(str(tmp_path),), backend=GROUPS["device only"])[0]
    expected = run_ranks(kept_loop, 2, args=(str(tmp_path),), backend=GROUPS["both"])[0]
    assert len(losses) == 6
    assert largest_deviation(losses, expected) <= PARITY


def gathered(output_dir: str) -> list[list[float]]:
    return [train_gathered(output_dir, strategy) for strategy in ("ddp", "fsdp")]


def test_a_loss_over_the_rows_of_all_ranks(tmp_path: Path) -> None:
    """gather(): rows on the device, how many there are on the host."""
    expected = train_gathered(str(tmp_path), "ddp")
    for found in run_ranks(gathered, 2, 200, (str(tmp_path),), GROUPS["device only"]):
        for numbers in found:
            assert largest_deviation(numbers, expected) <= PARITY
