"""`drivetrain drill`."""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from drivetrain.core.errors import ConfigError, Problem


def run(words: tuple[str, ...], ranks: int, kinds: tuple[str, ...], step: int) -> int:
    """Each kind of fault once, on the user's own script."""
    from drivetrain.cli.terminal import terminal
    from drivetrain.verify.drills.drill import Setting, run_drill, run_reference, small_disk
    from drivetrain.verify.drills.faults import (
        ON_SMALL_DISK,
        ONE_HOST_ALL,
        Fault,
        Faults,
    )

    unknown = [kind for kind in kinds if kind not in ONE_HOST_ALL]
    if unknown:
        known = ", ".join(ONE_HOST_ALL)
        raise ConfigError([Problem("--faults", "unknown", f"use some of {known}", unknown[0])])
    console = terminal()
    setting = Setting((*words, f"checkpoint.every_steps={max(1, step // 4)}"), ranks)
    passed = True
    with (
        tempfile.TemporaryDirectory(prefix="drill-") as scratch,
        small_disk(Path(scratch) / "disk")
        if set(kinds) & set(ON_SMALL_DISK)
        else nullcontext() as disk,
    ):
        setting = replace(setting, disk=disk)
        console.print(f"{words[0]} on {ranks} ranks, without a fault …", markup=False)
        reference = run_reference(setting, Path(scratch) / "reference", timeout_s=3600)
        for kind in (each for each in ONE_HOST_ALL if each in kinds):
            faults = Faults((Fault(kind, step, rank=ranks - 1),))
            outcome = run_drill(setting, faults, reference, Path(scratch) / kind, timeout_s=3600)
            passed &= outcome.passed
            took = ", ".join(f"{value:.1f} s" for value in outcome.recovery_s) or "–"
            verdict = "same weights, every sample once" if outcome.passed else outcome.problems[0]
            console.print(f"{kind:16}  recovered in {took:8}  {verdict}", markup=False)
    return 0 if passed else 1
