"""`drivetrain bench supervision`: what being watched costs when nothing goes wrong.

The same script under torchrun and under Drivetrain's supervisor, in turn; compared is the time of a
step in the middle of the run, which start-up and the end do not touch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from drivetrain.bench.statistics import Estimate, paired_ratio
from drivetrain.record.session import RUN_DIR

_SKIP = 50
_WORDS = ("-m", "drivetrain.bench.supervision_worker")


def run_supervision(output: Path, num_rounds: int) -> str:
    """Rounds of torchrun, torchrun again and drivetrain; the table."""
    output.mkdir(parents=True, exist_ok=True)
    flags = ["--nproc-per-node=2"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", *flags, *_WORDS]
    ours = [sys.executable, "-m", "drivetrain", "train", *flags, *_WORDS]
    arms = {"torchrun": torchrun, "drivetrain": ours, "torchrun again": torchrun}
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(num_rounds):
        names = list(arms)
        for name in names[number % 3 :] + names[: number % 3]:
            seconds[name].append(_median_step(arms[name]))
            (output / "samples.json").write_text(json.dumps(seconds, indent=1) + "\n")
    table = make_table(seconds)
    (output / "table.md").write_text(table)
    return table


def make_table(seconds: dict[str, list[float]]) -> str:
    """Ratios to torchrun of the same round."""
    lines = [
        "Median step of each run, 2 ranks, CPU, gloo; ratio to torchrun's run of the same round, "
        "with the bootstrap's 95% interval; `torchrun again` is the A/A arm. Not run on a GPU.",
        "",
        "| arm | rounds | median step | ratio |",
        "| --- | ---: | ---: | --- |",
    ]
    for name, values in seconds.items():
        ratio = "1" if name == "torchrun" else _shown(paired_ratio(values, seconds["torchrun"]))
        lines.append(f"| {name} | {len(values)} | {median(values) * 1e3:.3f} ms | {ratio} |")
    return "\n".join(lines) + "\n"


def _shown(estimate: Estimate) -> str:
    return f"{estimate.value:.4f} ({estimate.low:.4f} to {estimate.high:.4f})"


def _median_step(command: list[str]) -> float:
    with tempfile.TemporaryDirectory(prefix="supervision-") as folder:
        environment = {**os.environ, RUN_DIR: f"{folder}/run", "OMP_NUM_THREADS": "1"}
        subprocess.run(
            command,
            env=environment,
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        events = (Path(folder) / "run" / "events" / "00000.jsonl").read_text().splitlines()
        spans: list[dict[str, Any]] = [json.loads(line) for line in events]
        steps = [span["duration_s"] for span in spans if span.get("name") == "step"]
        return float(median(steps[_SKIP:]))
