"""`python -m benchmarks recovery`: kill -9 trials, side by side.

The same script (with Drivetrain's Trainer, so with its checkpoints) under torchrun, under torchrun
with its known work-around, and under Drivetrain's supervisor. A trial kills one rank without
warning and measures the time to the next committed checkpoint of a later attempt.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from drivetrain.checkpoint.manifest import NAME
from drivetrain.record.session import RUN_DIR

_SCRIPT = "benchmarks.faults.recovery_worker"
_STEPS, _KILL_AFTER, _GIVE_UP_S = 100_000, 12, 30.0
_SETTLE_S = 20.0
"""Two busy ranks on two cores: spares, where there are some, have imported everything by then."""
PIDS = "DRIVETRAIN_BENCH_PIDS"


def _torchrun(run: Path) -> list[str]:  # noqa: ARG001 - the run's directory comes by a variable
    flags = ["--standalone", "--nproc-per-node=2", "--max-restarts=3"]
    return [sys.executable, "-m", "torch.distributed.run", *flags]


def _drivetrain(run: Path, *flags: str) -> list[str]:
    words = [f"--run-dir={run}", "--nproc-per-node=2", *flags]
    return [sys.executable, "-m", "drivetrain", "train", *words]


ARMS: Mapping[str, tuple[Any, dict[str, str]]] = {
    "torchrun": (_torchrun, {}),
    "torchrun, work-around": (_torchrun, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}),
    "drivetrain, no spares": (lambda run: _drivetrain(run, "--spares=0"), {}),
    "drivetrain, warm spares": (_drivetrain, {}),
    "drivetrain, live": (lambda run: _drivetrain(run, "--live"), {}),
}


def run_recovery(output: Path, num_trials: int) -> str:
    """Trials of all arms in turn; the table."""
    output.mkdir(parents=True, exist_ok=True)
    trials: dict[str, list[float | None]] = {name: [] for name in ARMS}
    for number in range(num_trials):
        for name in ARMS:
            trials[name].append(_trial(name, victim=number % 2))
            (output / "samples.json").write_text(json.dumps(trials, indent=1) + "\n")
    table = make_table(trials)
    (output / "table.md").write_text(table)
    return table


def make_table(trials: Mapping[str, list[float | None]]) -> str:
    """How often the run came back by itself, and how fast."""
    lines = [
        "Seconds from SIGKILL of one of 2 ranks to the next committed checkpoint "
        f"(a save after every step; given up after {_GIVE_UP_S:g} s). CPU, gloo; "
        "not run on a GPU.",
        "",
        "| arm | trials | recovered | p50 | min | max |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, values in trials.items():
        times = sorted(value for value in values if value is not None)
        figures = (
            f"{median(times):.2f} | {times[0]:.2f} | {times[-1]:.2f}" if times else "– | – | –"
        )
        lines.append(f"| {name} | {len(values)} | {len(times)} | {figures} |")
    return "\n".join(lines) + "\n"


def _trial(name: str, victim: int) -> float | None:
    """Seconds, or None when the run did not come back."""
    make, extra = ARMS[name]
    folder = Path(tempfile.mkdtemp(prefix="recovery-"))
    run, pids = folder / "run", folder / "pids"
    pids.mkdir()
    environment = {**os.environ, **extra, RUN_DIR: str(run), PIDS: str(pids)}
    process = subprocess.Popen(
        [*make(run), "-m", _SCRIPT, f"max_steps={_STEPS}"],
        env={**environment, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return _kill_and_wait(process, run, pids, victim, by_step="live" in name)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        _end(process)
        shutil.rmtree(folder, ignore_errors=True)


def _kill_and_wait(
    process: subprocess.Popen[bytes], run: Path, pids: Path, victim: int, *, by_step: bool
) -> float | None:
    deadline_s = time.monotonic() + 60
    while _newest(run)[1] < _KILL_AFTER:
        if time.monotonic() > deadline_s or process.poll() is not None:
            raise RuntimeError("the run did not start")
        time.sleep(0.01)
    time.sleep(_SETTLE_S)
    attempt, step = _newest(run)
    pid = int(max(pids.glob(f"{victim}-*"), key=lambda path: path.stat().st_mtime).name[2:])
    killed_s = time.time()
    os.kill(pid, signal.SIGKILL)
    while time.time() - killed_s < _GIVE_UP_S and process.poll() is None:
        now = _newest(run)
        # live replicas go on in the same attempt: there the next but one step counts, since the
        # one under way may have been about to be committed
        if now[0] > attempt or (by_step and now[1] > step + 2):
            return time.time() - killed_s
        time.sleep(0.005)
    return None


def _newest(run: Path) -> tuple[int, int]:
    """(attempt, step) of the newest committed checkpoint."""
    found = [(0, 0)]
    for path in (run / "checkpoints").glob(f"step-*/{NAME}"):
        _, step, attempt = path.parent.name.split("-")
        found.append((int(attempt[1:]), int(step)))
    return max(found)


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
