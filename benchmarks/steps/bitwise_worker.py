"""One rank of `python -m benchmarks bitwise`: standard and bitwise runs in interleaved blocks."""

from __future__ import annotations

import tempfile
from typing import Any

import torch.distributed as dist

from benchmarks.steps.arms import TOTAL_STEPS, Run
from benchmarks.steps.interleaved import run_rank, timed_blocks
from benchmarks.steps.workloads import LEARNING_RATE, MAX_GRAD_NORM, Workload, transformer
from drivetrain.train.keep_loop import KeptLoop, prepare


def kept_loop(workload: Workload, accumulation: int, directory: str, **changes: Any) -> Run:
    """A training that can be paused: a loop of one's own over Drivetrain's steps."""
    return paced(prepared(workload, accumulation, directory, **changes), workload)


def prepared(workload: Workload, accumulation: int, directory: str, **changes: Any) -> KeptLoop:
    """The loop before its first step."""
    config: dict[str, Any] = {
        "global_batch_size": workload.batch_size * accumulation * dist.get_world_size(),
        "micro_batch_size": workload.batch_size,
        "max_steps": TOTAL_STEPS,
        "output_dir": directory,
        "optimization": {"learning_rate": LEARNING_RATE, "max_grad_norm": MAX_GRAD_NORM},
        "checkpoint": {"every_steps": None},
        "record": {"progress": "none", "sinks": []},
        **changes,
    }
    return prepare(workload.model, None, workload.dataset(), config)


def paced(loop: KeptLoop, workload: Workload) -> Run:
    """So many steps of it at a time."""
    steps = loop.steps()

    def run(num_steps: int) -> None:
        for _ in range(num_steps):
            for batch in next(steps):
                loop.backward(workload.loss(loop.model, batch))
            loop.step()

    return run


def measure(num_rounds: int) -> dict[str, dict[str, list[float]]]:
    """Both modes, without and with accumulation."""
    return {
        f"transformer, accumulation {number}": _measure(transformer(), number, num_rounds)
        for number in (1, 4)
    }


def _measure(workload: Workload, accumulation: int, num_rounds: int) -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory() as directory:
        arms = {
            name: kept_loop(
                workload, accumulation, directory, reproducibility=name.partition(" ")[0]
            )
            for name in ("standard", "standard again", "bitwise")
        }
        return timed_blocks(arms, workload.steps_per_block, num_rounds)


if __name__ == "__main__":
    run_rank(measure)
