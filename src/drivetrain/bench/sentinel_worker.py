"""One rank of `drivetrain bench sentinel`: a comparison in every step, next to none."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from drivetrain.bench.bitwise_worker import WARM_UP_ROUNDS, kept_loop
from drivetrain.bench.interleaved import interleaved
from drivetrain.bench.workloads import Workload, transformer
from drivetrain.train.sentinel import Sentinel

_EVERY = {"off": None, "off again": None, "every step": 1}


def measure(workload: Workload, num_rounds: int) -> dict[str, list[float]]:
    """Seconds per step of each arm, round by round, the warm-up left out."""
    with tempfile.TemporaryDirectory() as directory:
        arms = {
            name: kept_loop(workload, 1, directory, sentinel={"every_steps": every})
            for name, every in _EVERY.items()
        }
        seconds: dict[str, list[float]] = {name: [] for name in arms}
        for name in interleaved(arms, num_rounds + WARM_UP_ROUNDS):
            dist.barrier()
            began_s = time.perf_counter()
            arms[name](workload.steps_per_block)
            elapsed_s = time.perf_counter() - began_s
            seconds[name].append(elapsed_s / workload.steps_per_block)
        return {name: values[WARM_UP_ROUNDS:] for name, values in seconds.items()}


def time_checks(workload: Workload, num_checks: int) -> list[float]:
    """Seconds that each of some comparisons takes, with nothing else in between."""
    group = dist.group.WORLD
    if group is None:
        raise RuntimeError("a comparison needs a process group")
    torch.manual_seed(0)
    sentinel = Sentinel(workload.model(), group, every_steps=1)
    seconds = []
    for step in range(num_checks):
        dist.barrier()
        began_s = time.perf_counter()
        sentinel.check(step)
        seconds.append(time.perf_counter() - began_s)
    return seconds


def main() -> None:
    """`… OUTPUT NUM_ROUNDS`: rank 0 writes the raw samples as JSON."""
    output, num_rounds = Path(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group("gloo")
    samples = {"ddp, transformer": measure(transformer(), num_rounds)}
    checks = time_checks(transformer(), 10 * num_rounds)
    if dist.get_rank() == 0:
        output.write_text(json.dumps(samples))
        (output.parent / "checks.json").write_text(json.dumps(checks))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
