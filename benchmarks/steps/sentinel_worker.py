"""One rank of `python -m benchmarks sentinel`: a comparison in every step, next to none."""

from __future__ import annotations

import json
import tempfile
import time

import torch
import torch.distributed as dist

from benchmarks.steps.bitwise_worker import kept_loop
from benchmarks.steps.interleaved import run_rank, timed_blocks
from benchmarks.steps.workloads import Workload, transformer
from drivetrain.train.watch.sentinel import Sentinel

_EVERY = {"off": None, "off again": None, "every step": 1}


def measure(num_rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds per step of each arm, round by round."""
    workload = transformer()
    with tempfile.TemporaryDirectory() as directory:
        arms = {
            name: kept_loop(workload, 1, directory, sentinel={"every_steps": every})
            for name, every in _EVERY.items()
        }
        return {"ddp, transformer": timed_blocks(arms, workload.steps_per_block, num_rounds)}


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
    """Samples of steps, and of comparisons in a file beside them."""
    checks: list[float] = []

    def both(num_rounds: int) -> dict[str, dict[str, list[float]]]:
        samples = measure(num_rounds)
        checks.extend(time_checks(transformer(), 10 * num_rounds))
        return samples

    output = run_rank(both)
    if output is not None:
        (output.parent / "checks.json").write_text(json.dumps(checks))


if __name__ == "__main__":
    main()
