"""Blocks of all arms in every round, drawn anew and the same on every rank, and their times."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.steps.device import meet, own_accelerator

WARM_UP_ROUNDS = 2


def interleaved(arms: Iterable[str], num_rounds: int) -> Iterator[str]:
    """The arms' names, one block each, round after round."""
    shuffle = random.Random(0)  # noqa: S311 - the same order on every rank
    for _ in range(num_rounds):
        order = list(arms)
        shuffle.shuffle(order)
        yield from order


def timed_blocks(
    arms: Mapping[str, Callable[[int], None]], steps_per_block: int, num_rounds: int
) -> dict[str, list[float]]:
    """Seconds per step of each arm, round by round, the warm-up left out."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for name in interleaved(arms, num_rounds + WARM_UP_ROUNDS):
        dist.barrier()
        began_s = time.perf_counter()
        arms[name](steps_per_block)
        own_accelerator().synchronize()  # or the clock would tell how fast the host asks
        seconds[name].append((time.perf_counter() - began_s) / steps_per_block)
    return {name: values[WARM_UP_ROUNDS:] for name, values in seconds.items()}


def run_rank(measure: Callable[[int], Mapping[str, Any]]) -> Path | None:
    """`… OUTPUT NUM_ROUNDS` on every rank: rank 0 writes raw samples as JSON, and is told where.

    The process group is there when `measure(num_rounds)` is called, and gone afterwards.
    """
    output, num_rounds = Path(sys.argv[1]), int(sys.argv[2])
    meet()
    samples = measure(num_rounds)
    is_main = dist.get_rank() == 0
    if is_main:
        output.write_text(json.dumps(samples))
    dist.barrier()
    dist.destroy_process_group()
    return output if is_main else None
