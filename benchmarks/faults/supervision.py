"""`python -m benchmarks supervision`: what being watched costs when nothing goes wrong.

Two runs of one script differ by more than supervision costs. So each run is its own yardstick: its
supervisor is stopped (SIGSTOP) for a second and let go on for a second, in turn, and steps of
neighbouring seconds are compared. Plain torchrun's agent is measured in the same way, in turn; and
`drivetrain` with its supervisor stopped in both seconds is the A/A arm. What a supervisor can cost
at most is the processor time it takes: that is counted, too.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median

from drivetrain.core.statistics import MedianInterval, bootstrap
from drivetrain.record.session import RUN_DIR
from drivetrain.supervise.failures.rank_dump import kernel_state

_WORDS = ("-m", "benchmarks.faults.supervision_worker")
TIMES = "DRIVETRAIN_BENCH_TIMES"
"""Where a rank writes down when its steps ended."""
_SETTLE_S = 20.0  # imports, and the warm spares' imports, are over
_WINDOW_S, _WINDOWS = 1.0, 16
_EDGE_S = 0.05  # what a signal takes to act
_Pair = tuple[float, float]


def run_supervision(output: Path, num_rounds: int) -> str:
    """Rounds of torchrun, drivetrain and drivetrain's A/A; the table."""
    output.mkdir(parents=True, exist_ok=True)
    flags = ["--nproc-per-node=2"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", *flags, *_WORDS]
    ours = [sys.executable, "-m", "drivetrain", "train", *flags, *_WORDS]
    arms = {
        "torchrun": (torchrun, True),
        "drivetrain": (ours, True),
        "drivetrain, never let go on": (ours, False),
    }
    pairs: dict[str, list[_Pair]] = {name: [] for name in arms}
    shares: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(num_rounds):
        names = list(arms)
        for name in names[number % 3 :] + names[: number % 3]:
            command, lets_go = arms[name]
            found, share = _watched_and_not(command, lets_go=lets_go)
            pairs[name] += found
            shares[name].append(share)
            samples = {"pairs": pairs, "cpu_shares": shares}
            (output / "samples.json").write_text(json.dumps(samples, indent=1) + "\n")
    table = make_table(pairs, shares)
    (output / "table.md").write_text(table)
    return table


def make_table(pairs: dict[str, list[_Pair]], shares: dict[str, list[float]]) -> str:
    """Steps while the supervisor works against steps while it is stopped."""
    lines = [
        "Median step of a second in which the supervisor works, against that of the next, in which "
        "it is stopped; 2 ranks, CPU, gloo; median over pairs with the bootstrap's 95% interval. "
        "The last column is the processor time of everything but the ranks while it works, as a "
        "share of one core. Not run on a GPU.",
        "",
        "| supervisor | pairs | median step | watched / not watched | of a core |",
        "| --- | ---: | ---: | --- | ---: |",
    ]
    for name, values in pairs.items():
        step_ms = median(watched for watched, _ in values) * 1e3
        shown = _shown(bootstrap([watched / alone for watched, alone in values]))
        share = f"{median(shares[name]):.2%}"
        lines.append(f"| {name} | {len(values)} | {step_ms:.2f} ms | {shown} | {share} |")
    return "\n".join(lines) + "\n"


def _shown(estimate: MedianInterval) -> str:
    return f"{estimate.value:.4f} ({estimate.low:.4f} to {estimate.high:.4f})"


def _watched_and_not(command: list[str], *, lets_go: bool) -> tuple[list[_Pair], float]:
    """One run: the median step of each pair of neighbouring seconds; the supervisor's share."""
    with tempfile.TemporaryDirectory(prefix="supervision-") as folder:
        times = Path(folder) / "times.json"
        environment = {
            **os.environ,
            RUN_DIR: f"{folder}/run",
            TIMES: str(times),
            "OMP_NUM_THREADS": "1",
        }
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as process:
            began = time.monotonic()
            while not times.exists() and time.monotonic() - began < 60:
                time.sleep(0.1)
            ranks = {int(pid) for pid in times.read_text().split()}
            time.sleep(_SETTLE_S)
            watchers = [pid for pid in _family(process.pid) if pid not in ranks]
            before = _cpu_s(watchers)
            windows = _stop_and_go(watchers, lets_go=lets_go)
            taken = _cpu_s(watchers) - before
            process.wait(timeout=600)  # three minutes where cores are shared with others
        ended: list[float] = json.loads(times.read_text())
        medians = [_median_step(ended, *window) for window in windows]
        worked_s = _WINDOW_S * _WINDOWS / 2 if lets_go else _WINDOW_S * _WINDOWS
        return list(zip(medians[::2], medians[1::2], strict=True)), taken / worked_s


def _stop_and_go(watchers: list[int], *, lets_go: bool) -> list[_Pair]:
    """Windows (begin, end): in the even ones the supervisor works, in the odd ones not."""
    windows = []
    try:
        for number in range(_WINDOWS):
            works = number % 2 == 0 and lets_go
            for pid in watchers:
                os.kill(pid, signal.SIGCONT if works else signal.SIGSTOP)
            begin = time.monotonic() + _EDGE_S
            time.sleep(_WINDOW_S)
            windows.append((begin, time.monotonic()))
    finally:
        for pid in watchers:
            os.kill(pid, signal.SIGCONT)
    return windows


def _family(launcher: int) -> list[int]:
    """A process and all that descend from it."""
    parents = {int(e): kernel_state(int(e)) for e in os.listdir("/proc") if e.isdigit()}
    family = [launcher]
    for member in family:
        family += [pid for pid, found in parents.items() if found and found[1] == member]
    return family


def _cpu_s(pids: list[int]) -> float:
    """Processor time of these processes so far."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _median_step(ended: list[float], begin: float, end: float) -> float:
    inside = [moment for moment in ended if begin <= moment <= end]
    return median(b - a for a, b in pairwise(inside))
