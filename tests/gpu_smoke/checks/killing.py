"""A rank is killed half-way; the supervised run ends with the weights it would have had."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from drivetrain.parallel.accelerator import num_devices
from drivetrain.verify.drills import Faults
from drivetrain.verify.drills.drill import (
    Setting,
    checkpoint_problems,
    run_once,
    weights_fingerprint,
)
from tests.gpu_smoke.devices import is_cut, left_s
from tests.gpu_smoke.rows import Row, judged

STEPS = 24
WORDS = (
    *("-m", "drivetrain.verify.drills.workload", "reproducibility=bitwise"),
    *(f"max_steps={STEPS}", "checkpoint.every_steps=4"),
)
# the drills' own is made for CPUs: the first step on a device loads libraries and kernels
PATIENCE = ("--stall-timeout", "60")


def rows() -> Iterator[Row]:
    ranks = min(2, num_devices())
    setting = Setting(WORDS, ranks, flags=PATIENCE)
    kill = Faults().kill_at(STEPS // 2, rank=ranks - 1)
    with TemporaryDirectory(prefix="gpu-smoke-") as folder:
        whole, killed = Path(folder) / "whole", Path(folder) / "killed"
        problems = run_once(setting, Faults(), whole, left_s()).problems
        if problems:
            yield _failure("without a kill", problems)
            return
        outcome = run_once(setting, kill, killed, left_s())
        problems = outcome.problems + checkpoint_problems(killed / "run")
        if problems:
            yield _failure("with a kill", problems)
            return
        first, second = (weights_fingerprint(each / "run") for each in (whole, killed))
    back_s = ", ".join(f"{seconds:.1f} s" for seconds in outcome.recovery_s)
    figure = (
        f"SHA-256 {first[:16]} without, {second[:16]} with; {outcome.attempts} attempts; "
        f"{back_s} from the kill to the next checkpoint"
    )
    is_good = first == second and outcome.attempts == 2
    yield judged(f"rank {ranks - 1} of {ranks} after step {STEPS // 2}", is_good, figure)


def _failure(name: str, problems: list[str]) -> Row:
    if is_cut():
        raise TimeoutError
    return judged(name, False, "; ".join(problems)[-600:])
