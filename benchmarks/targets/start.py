"""`python -m benchmarks start`: from Enter to the script's first line, next to torchrun.

The same script under both, in turn; the clock is the machine's, which all its processes share. The
last rank counts: nobody trains before it is there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from drivetrain.core.statistics import MedianInterval, paired_ratio

_SCRIPT = Path(__file__).with_name("start_worker.py")
_BASELINE = "torchrun"
_Sample = tuple[float, float]
"""Seconds to the first line, and to the end of the first collective."""


def run_start(output: Path, num_rounds: int, num_ranks: int) -> str:
    """Rounds of every arm, in turning order; the table."""
    output.mkdir(parents=True, exist_ok=True)
    flags = [f"--nproc-per-node={num_ranks}"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", *flags]
    ours = [sys.executable, "-m", "drivetrain", "train", *flags]
    arms = {
        _BASELINE: torchrun,
        "torchrun again": torchrun,
        "drivetrain train": ours,
        "drivetrain train --warm-start": [*ours, "--warm-start"],
    }
    samples: dict[str, list[_Sample]] = {name: [] for name in arms}
    for number in range(-1, num_rounds):  # the first round fills the page cache, and is not counted
        names = list(arms)
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            sample = _start(arms[name], num_ranks)
            if number >= 0:
                samples[name].append(sample)
        (output / "samples.json").write_text(json.dumps(samples, indent=1) + "\n")
    table = make_table(samples, num_ranks)
    (output / "table.md").write_text(table)
    return table


def make_table(samples: dict[str, list[_Sample]], num_ranks: int) -> str:
    """Medians, and ratios to torchrun in the same round."""
    num_rounds = len(samples[_BASELINE])
    lines = [
        f"From starting the command to the script's first line, and to the end of its first "
        f"collective, on the last of {num_ranks} ranks; CPU, gloo; {num_rounds} rounds, each with "
        f"every arm. Ratios: median over rounds, with the bootstrap's 95% interval. "
        f"`torchrun again` is the A/A arm. Not run on a GPU.",
        "",
        "| command | first line | ratio | first collective | ratio |",
        "| --- | ---: | --- | ---: | --- |",
    ]
    for name, values in samples.items():
        cells = [name]
        for index in (0, 1):
            own = [value[index] for value in values]
            theirs = [value[index] for value in samples[_BASELINE]]
            cells.append(f"{median(own):.2f} s")
            cells.append("1" if name == _BASELINE else _shown(paired_ratio(own, theirs)))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _shown(estimate: MedianInterval) -> str:
    return f"{estimate.value:.3f} ({estimate.low:.3f} to {estimate.high:.3f})"


def _start(command: list[str], num_ranks: int) -> _Sample:
    with tempfile.TemporaryDirectory(prefix="start-") as folder:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        began_s = time.monotonic()
        done = subprocess.run(
            [*command, str(_SCRIPT), folder],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr}")
        moments = [
            [float(text) for text in (Path(folder) / str(rank)).read_text().split()]
            for rank in range(num_ranks)
        ]
    first_s, ready_s = (max(moment[index] for moment in moments) for index in (0, 1))
    return first_s - began_s, ready_s - began_s
