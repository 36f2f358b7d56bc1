"""One rank of `drivetrain bench bitwise`: standard and bitwise runs in interleaved blocks."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from drivetrain.bench.arms import TOTAL_STEPS, Run
from drivetrain.bench.interleaved import interleaved
from drivetrain.bench.workloads import LEARNING_RATE, MAX_GRAD_NORM, Workload, transformer
from drivetrain.train.keep_loop import prepare

WARM_UP_ROUNDS = 2


def kept_loop(workload: Workload, accumulation: int, directory: str, **changes: Any) -> Run:
    """A training that can be paused: a loop of one's own over Drivetrain's steps."""
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
    loop = prepare(workload.model, None, workload.dataset(), config)
    steps = loop.steps()

    def run(num_steps: int) -> None:
        for _ in range(num_steps):
            for batch in next(steps):
                loop.backward(workload.loss(loop.model, batch))
            loop.step()

    return run


def measure(workload: Workload, accumulation: int, num_rounds: int) -> dict[str, list[float]]:
    """Seconds per step of each arm, round by round, the warm-up left out."""
    with tempfile.TemporaryDirectory() as directory:
        arms = {
            name: kept_loop(
                workload, accumulation, directory, reproducibility=name.partition(" ")[0]
            )
            for name in ("standard", "standard again", "bitwise")
        }
        seconds: dict[str, list[float]] = {name: [] for name in arms}
        for name in interleaved(arms, num_rounds + WARM_UP_ROUNDS):
            dist.barrier()
            began_s = time.perf_counter()
            arms[name](workload.steps_per_block)
            elapsed_s = time.perf_counter() - began_s
            seconds[name].append(elapsed_s / workload.steps_per_block)
        return {name: values[WARM_UP_ROUNDS:] for name, values in seconds.items()}


def main() -> None:
    """`… OUTPUT NUM_ROUNDS`: rank 0 writes the raw samples as JSON."""
    output, num_rounds = Path(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group("gloo")
    samples = {
        f"transformer, accumulation {accumulation}": measure(
            transformer(), accumulation, num_rounds
        )
        for accumulation in (1, 4)
    }
    if dist.get_rank() == 0:
        output.write_text(json.dumps(samples))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
