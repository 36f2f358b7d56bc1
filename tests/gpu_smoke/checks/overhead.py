"""A step next to the bare loop's, in interleaved blocks. Measured, not judged."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from benchmarks.report import PROCESSOR, TRAINING_THREAD, make_table
from benchmarks.steps.overhead_worker import OURS, Samples
from benchmarks.steps.workloads import near_empty, transformer
from drivetrain.core.statistics import paired_ratio
from drivetrain.parallel.accelerator import num_devices
from tests.gpu_smoke.devices import left_s
from tests.gpu_smoke.rows import PASS, Row

TRIAL, FEWEST, MOST = 2, 4, 60
"""Rounds: of a first run that tells how long one takes, and of the ones that count."""


def rows() -> Iterator[Row]:
    """One rank, then as many as there are devices (ddp and fsdp)."""
    with TemporaryDirectory(prefix="gpu-smoke-") as folder:
        rounds = _num_rounds(_measure(Path(folder), 1, TRIAL))
        for ranks in sorted({1, num_devices()}):
            yield from _shown(_measure(Path(folder), ranks, rounds), ranks, rounds)


def _shown(samples: Samples, num_ranks: int, num_rounds: int) -> Iterator[Row]:
    table = make_table(samples, "bare", {"ranks": num_ranks, "rounds": num_rounds})
    by_clock = {name: arms for name, arms in samples.items() if PROCESSOR not in name}
    for name, arms in by_clock.items():
        ours, again = (paired_ratio(arms[arm], arms["bare"]) for arm in (OURS, "bare again"))
        figure = (
            f"{ours.value:.3f} of the bare loop ({ours.low:.3f} to {ours.high:.3f}); "
            f"A/A {again.value:.3f} ({again.low:.3f} to {again.high:.3f}); "
            f"a step {median(arms[OURS]) * 1e3:.2f} ms"
        )
        yield Row(name, PASS, figure, table)
        table = ""


def _num_rounds(trial: Samples) -> int:
    """As many as fit: a round of ddp and fsdp takes about four times one rank's."""
    blocks = {f"1 rank, {w.name}": w.steps_per_block for w in (near_empty(), transformer())}
    round_s = sum(
        median(seconds) * blocks[name]
        for name, arms in trial.items()
        if name in blocks
        for seconds in arms.values()
    )
    starting_s = 45
    return max(FEWEST, min(MOST, int((left_s() - starting_s) / (5 * round_s)) - TRIAL))


def _measure(folder: Path, num_ranks: int, num_rounds: int) -> Samples:
    output = folder / "samples.json"
    worker = ["-m", "benchmarks.steps.overhead_worker", str(output), str(num_rounds), "bare"]
    words = [sys.executable, "-m", "drivetrain", "train", "--nproc-per-node", str(num_ranks)]
    subprocess.run([*words, *worker], check=True, timeout=left_s())
    samples: Samples = json.loads(output.read_text())
    return {name: arms for name, arms in samples.items() if _is_shown(name)}


def _is_shown(training: str) -> bool:
    return PROCESSOR not in training or training.endswith(TRAINING_THREAD)
