"""A check in processes of its own: whatever it does, the next one begins on a clean machine."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from drivetrain.supervise.processes.node import adopt_orphans
from drivetrain.verify.drills.drill import descendants
from tests.gpu_smoke.budget import share
from tests.gpu_smoke.catalogue import Check
from tests.gpu_smoke.devices import CUT, DEADLINE, FOLDER
from tests.gpu_smoke.rows import FAIL, NOT_RUN, SKIPPED, Result, Row, read_rows

_TAIL_LINES = 25
# The same bits need a cuBLAS that adds in a fixed order, and it looks when CUDA begins.
_ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def run_check(check: Check, num_devices: int, used_s: float, folder: Path) -> Result:
    """Its rows, and how long it took."""
    if num_devices < check.min_devices:
        reason = f"needs {check.min_devices} devices, there are {num_devices}"
        return Result(check.title, [Row("all", SKIPPED, reason)])
    limit_s = share(check.times, used_s)
    if limit_s is None:
        return Result(check.title, [Row("all", NOT_RUN, "the ten minutes are nearly over")])
    began_s = time.monotonic()
    rows = _run(check, limit_s, folder)
    return Result(check.title, rows, time.monotonic() - began_s)


def _run(check: Check, limit_s: float, folder: Path) -> list[Row]:
    said, log = folder / f"{check.name}.jsonl", folder / f"{check.name}.log"
    said.unlink(missing_ok=True)
    told = {DEADLINE: str(time.monotonic() + limit_s), FOLDER: str(folder)}
    if limit_s < check.times.limit_s:
        told[CUT] = "1"
    adopt_orphans()
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.gpu_smoke.check", check.name, str(said)],
            env={**os.environ, **_ENVIRONMENT, **told},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end_all()
            process.wait()
    rows = read_rows(said)
    if code is None:
        rows.append(_late(check, limit_s, log))
    elif code != 0:
        rows.append(Row("the check itself", FAIL, f"ended with exit code {code}", _tail(log)))
    return rows


def _late(check: Check, limit_s: float, log: Path) -> Row:
    if limit_s < check.times.limit_s:
        return Row("the rest", NOT_RUN, "the ten minutes are over")
    return Row("the rest", FAIL, f"still running after {limit_s:.0f} s", _tail(log))


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
    return "\n".join([f"The last lines of `{log.name}`:", "", "```", *lines, "```"])


def end_all() -> None:
    """Every process below this one, and what has lost its parent meanwhile."""
    while left := descendants():
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
