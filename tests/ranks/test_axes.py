"""Every way to divide a model trains what one process trains, and goes on from any other's save."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.core.errors import WorkerFailure
from drivetrain.testing import run_ranks
from tests.ranks import matrix
from tests.ranks.training import largest_deviation

# the core of the matrix, a few steps of it; `make matrix` runs all of it
STEPS = 10
CORE = {
    2: {
        "gpt": ["tp+sp", "cp", "pp 1f1b", "pp zbv"],
        "hf_gpt2": ["pp 1f1b"],
        "hf_llama": ["tp", "pp zero bubble"],
    },
    4: {"gpt": ["fsdp×tp", "fsdp×pp", "tp×pp"]},
}


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.long  # the same layouts train on the test accelerator, beside the CPU
@pytest.mark.parametrize("world_size", [2, 4])
def test_every_axis_trains_what_one_process_trains(world_size: int, tmp_path: Path) -> None:
    if "hf_llama" in CORE[world_size] and find_spec("transformers") is None:
        pytest.skip("pip install 'drivetrain[plan]'")
    cells = [
        (f"{model}, {layout}", model, matrix.LAYOUTS[layout][1])
        for model, layouts in CORE[world_size].items()
        for layout in layouts
    ]
    references = {model: matrix.alone(model, str(tmp_path), STEPS) for model in CORE[world_size]}
    for results in run_ranks(
        matrix.train_in_turn, world_size, 380, args=(str(tmp_path / "ranks"), cells, STEPS)
    ):
        for name, losses in results.items():
            deviation = largest_deviation(losses, references[name.split(",")[0]])
            assert deviation <= matrix.TOLERANCE, f"{name}: losses part by {deviation:.2e}"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.long
def test_a_checkpoint_is_handed_from_layout_to_layout(tmp_path: Path) -> None:
    names = ["tp", "pp 1f1b", "fsdp", "cp", "pp interleaved", "ddp"]
    chain = [(name, matrix.LAYOUTS[name][1]) for name in names]
    reference = matrix.alone("gpt", str(tmp_path), STEPS)
    for results in run_ranks(
        matrix.hand_over, 2, 280, args=(str(tmp_path / "ranks"), "gpt", chain, STEPS)
    ):
        assert len(results) == len(chain)
        for name, losses in results.items():
            deviation = largest_deviation(losses, reference)
            assert deviation <= matrix.TOLERANCE, f"{name}: losses part by {deviation:.2e}"


def train_with_and_without_breaks(output_dir: str) -> list[str]:
    pipeline = matrix.LAYOUTS["pp gpipe"][1]
    runs = [matrix.train("resnet", output_dir, pipeline, 4)[1]]
    for save in ("sharded", "full"):
        _, begun = matrix.train("resnet", output_dir, pipeline, 2, every_steps=2, save=save)
        runs.append(matrix.train("resnet", output_dir, pipeline, 4, resume_from=begun)[1])
    return runs


def test_all_of_every_stage_is_saved_running_statistics_too(tmp_path: Path) -> None:
    runs = run_ranks(train_with_and_without_breaks, 2, 500, args=(str(tmp_path),))[0]
    whole, *resumed = (torch.load(f"{run}/checkpoints/weights.pt") for run in runs)
    assert whole["blocks.3.norm2.num_batches_tracked"] > 0
    for weights in resumed:
        assert all(torch.equal(whole[name], weights[name]) for name in whole)


def train_few_steps(output_dir: str, parallel: dict[str, Any]) -> list[float]:
    return matrix.train("gpt", output_dir, parallel, steps=3)[0]


def test_what_cannot_be_divided_is_refused_on_every_rank(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailure, match=r"does not divide the model's 4 heads; use 1, 2 or 4"):
        run_ranks(train_few_steps, 3, 60, args=(str(tmp_path), {"tp": 3}))
