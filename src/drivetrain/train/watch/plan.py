"""Compare a run with its plan: store plan.json in its directory and report deviations.

`drivetrain train --plan` passes the plan's file in the environment.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from drivetrain.core.files import write_whole
from drivetrain.core.text import readable_bytes
from drivetrain.train.hooks import Hook
from drivetrain.train.watch.requested import PLAN_VARIABLE

if TYPE_CHECKING:
    from drivetrain.train.trainer import Trainer

CHECKED_AT = 20
WARM_UP = 5
# a plan for a probed machine was within 10% in the median; below twice that nothing is reported
STRAYS = 0.25


class PlanWatch(Hook):
    """Compares the time of the first steps with the plan, on the main rank."""

    def __init__(self) -> None:
        self._plan: dict[str, Any] = json.loads(Path(os.environ[PLAN_VARIABLE]).read_text())
        self._is_checked = False

    def on_fit_start(self, trainer: Trainer) -> None:
        """Store the plan in the run's directory."""
        if trainer.is_main and trainer.run_dir is not None:
            write_whole(trainer.run_dir / "plan.json", json.dumps(self._plan, indent=2) + "\n")

    def on_train_batch_end(self, trainer: Trainer, step: int) -> None:
        """Compare once, when the times of 20 steps are known."""
        if self._is_checked or not trainer.is_main or trainer.run_dir is None:
            return
        times = _times(trainer)
        if len(times) >= CHECKED_AT:
            self._is_checked = True
            check = compare(self._plan, median(times[WARM_UP:CHECKED_AT]), _peak_bytes(trainer))
            write_whole(trainer.run_dir / "plan-check.json", json.dumps(check, indent=2) + "\n")
            sys.stderr.write(f"plan: at step {step} {check['says']}\n")


def compare(plan: dict[str, Any], step_s: float, peak_bytes: float | None) -> dict[str, Any]:
    """Return measured and predicted values, and a sentence about them."""
    predicted = plan["plans"][0]
    expected = float(predicted["step_s"]["total"])
    off = step_s / expected - 1.0
    says = f"a step takes {_spoken(step_s)}, {_spoken(expected)} was predicted ({off:+.0%})"
    strays = abs(off) > STRAYS
    if peak_bytes is not None:
        most = float(predicted["memory_bytes"]["total"])
        says += f"; memory {readable_bytes(peak_bytes)}, {readable_bytes(most)} was predicted"
        strays = strays or peak_bytes > 1.03 * most
    if strays:
        says += "; the run deviates from its plan: measure the machine again (drivetrain probe)"
    return {
        "step_s": step_s,
        "predicted_step_s": expected,
        "peak_bytes": peak_bytes,
        "strays": strays,
        "says": says,
    }


def _times(trainer: Trainer) -> list[float]:
    """Return seconds of the first steps, including data loading and waiting."""
    assert trainer.assembly is not None  # noqa: S101 - it trains
    return trainer.assembly.engine.timer.first_s


def _peak_bytes(trainer: Trainer) -> int | None:
    assert trainer.assembly is not None  # noqa: S101 - it trains
    return trainer.assembly.world.accelerator.peak_bytes()


def _spoken(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"
