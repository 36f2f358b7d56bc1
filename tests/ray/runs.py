"""Runs on a Ray cluster of test hosts, and the same run in one process beside it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from drivetrain.testing.ray_cluster import RayCluster
from drivetrain.train.saving.weights import weights_sha256
from drivetrain.verify.scalars import step_scalars

PROJECT = Path(__file__).parent.parent.parent
BITWISE = ("reproducibility=bitwise", "record.logging_steps=1", "checkpoint.asynchronous=false")
ENOUGH_S = 600.0


def alone(run_dir: Path, script: str, *words: str) -> Path:
    """The run as one process does it."""
    variables = {**os.environ, "DRIVETRAIN_RUN_DIR": str(run_dir), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, f"{PROJECT}/tests/scripts/{script}", *words]
    subprocess.run(command, env=variables, check=True, timeout=ENOUGH_S)
    return run_dir


def start(
    cluster: RayCluster, run_dir: Path, script: str, *words: str, flags: tuple[str, ...] = ()
) -> subprocess.Popen[str]:
    """Render the driver at the desk and run it on the head, as one may by hand."""
    run_dir.mkdir()
    train = [sys.executable, "-m", "drivetrain", "train", "--on=ray", "--dry-run", *flags]
    train += [f"--run-dir={run_dir}", f"tests/scripts/{script}", *words]
    done = subprocess.run(
        train, cwd=PROJECT, capture_output=True, text=True, check=True, timeout=ENOUGH_S
    )
    (run_dir / "job.py").write_text(done.stdout)
    with (run_dir / "output.txt").open("w") as output:
        return cluster.head.popen(
            [sys.executable, run_dir / "job.py"],
            env=cluster.environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def finish(driver: subprocess.Popen[str], run_dir: Path) -> str:
    """Its output; the run must have ended well."""
    code = driver.wait(ENOUGH_S)
    output = (run_dir / "output.txt").read_text()
    assert code == 0, output
    return output


def losses(run_dir: Path) -> dict[int, float]:
    return {step: values["train/loss"] for step, values in step_scalars(run_dir).items()}


def weights(run_dir: Path) -> str:
    return weights_sha256(torch.load(run_dir / "checkpoints" / "weights.pt", weights_only=True))


def lives(run_dir: Path) -> list[dict[str, Any]]:
    """What each attempt began with."""
    found = sorted((run_dir / "attempts").glob("*/start.json"))
    return [json.loads(path.read_text()) for path in found]


def wait_until(is_so: Callable[[], bool], driver: subprocess.Popen[str] | None = None) -> None:
    deadline_s = time.monotonic() + ENOUGH_S
    while not is_so():
        assert driver is None or driver.poll() is None, "the run has ended before"
        assert time.monotonic() < deadline_s, "it never came to be"
        time.sleep(0.2)


def num_steps(run_dir: Path) -> int:
    try:
        return max(losses(run_dir), default=0)
    except FileNotFoundError:
        return 0
