"""Runs on targets, as a test sees them from outside: their directory, their processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from drivetrain.verify.drills.drill import weights_fingerprint
from drivetrain.verify.parity.compare import TOLERANCES
from drivetrain.verify.scalars import step_scalars

ROOT = Path(__file__).parents[2]
DRIVETRAIN = (sys.executable, "-m", "drivetrain")
WORKLOAD = ("-m", "drivetrain.verify.drills.workload", "max_steps=60", "record.logging_steps=1")
SAVES_ONLY_WHEN_ASKED = "checkpoint.every_steps=1000"
QUICK = ("--warm-start", "--spares=0")
STEPS = ("max_steps=20", "evaluation.every_steps=20", "record.logging_steps=1")
# the machine's cores are shared by all "hosts"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def alone(folder: Path, *words: str, ranks: int = 1) -> Path:
    """The same training without any target; its run directory."""
    run = folder / "alone"
    flags = [f"--run-dir={run}", f"--nproc-per-node={ranks}", *QUICK]
    command = [*DRIVETRAIN, "train", *flags, *words]
    subprocess.run(command, check=True, env=ENVIRONMENT, capture_output=True, timeout=300)
    return run


def slowly(pause_s: float) -> tuple[str, ...]:
    """Flags that make WORKLOAD take its time: three such pauses a step, on four ranks."""
    return (f"--env=DRIVETRAIN_DRILL_PAUSE_S={pause_s}",)


def assert_same_losses(run: Path, reference: Path, num_steps: int = 20) -> None:
    """Step by step, within what rounding explains."""
    found, expected = (
        {step: values["train/loss"] for step, values in step_scalars(path).items()}
        for path in (run, reference)
    )
    assert len(expected) == num_steps
    assert found.keys() == expected.keys()
    apart = {s: abs(found[s] - expected[s]) / abs(expected[s]) for s in expected}
    assert max(apart.values()) < TOLERANCES["fp32"].loss, apart


def assert_same_weights(run: Path, reference: Path) -> None:
    assert weights_fingerprint(run) == weights_fingerprint(reference)


def is_training(run: Path) -> bool:
    """Whether a first step is done: from then on a request to stop finds something to save."""
    try:
        return "train/loss" in (run / "events" / "00000.jsonl").read_text()
    except OSError:
        return False


def newest_step(run: Path) -> int:
    found = (run / "checkpoints").glob("step-*/manifest.json")
    return max((int(path.parent.name.split("-")[1]) for path in found), default=0)


def wait_until(is_so: Callable[[], bool], what: str, timeout_s: float = 120.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline_s, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.05)


def wait_for_step(run: Path, step: int, timeout_s: float = 120.0) -> None:
    wait_until(lambda: newest_step(run) >= step, f"step {step} saved", timeout_s)


def processes_of(run: Path) -> list[str]:
    """Command lines and environments that name this run; nothing may be left of it."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            command = (entry / "cmdline").read_bytes()
            text = command + (entry / "environ").read_bytes()
        except OSError:
            continue
        if str(run).encode() in text:
            found.append(f"{entry.name}: {command.replace(bytes(1), b' ').decode()[:100]}")
    return found
