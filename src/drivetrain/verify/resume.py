"""The resume certificate: do N/2 steps, SIGKILL and N/2 more give the same run as N steps?

The script runs once without a fault, and once with a rank killed half-way. In the same layout the
final weights must be equal bit for bit; in another, the losses must agree within a tolerance.
If they differ, the script runs once more without a fault: one that does not repeat itself, for
example because it sets no seed, gives no information about resuming.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from drivetrain.config.script_parser import settings_problem
from drivetrain.core.errors import ConfigError
from drivetrain.verify.drills.drill import (
    NoFinalWeights,
    Setting,
    checkpoint_problems,
    run_once,
    weights_fingerprint,
)
from drivetrain.verify.drills.faults import Faults
from drivetrain.verify.scalars import step_scalars

TOLERANCE = 1e-4
"""Allowed relative deviation of a loss in another layout, which adds sums in another order."""


@dataclass(frozen=True)
class Certificate:
    """What was compared, and the result."""

    script: str
    steps: int
    killed_after: int
    resumed_from: int
    layouts: tuple[int, int]
    """Number of ranks before and after the kill."""
    same_bits: bool
    deviation: float
    """Largest relative deviation of any logged loss after the kill."""
    problems: tuple[str, ...] = ()
    repeats: bool | None = None
    """Whether a second run without a fault has the same weights; None if nobody needed to know."""

    @property
    def holds(self) -> bool:
        """Whether the script resumes exactly."""
        same_layout = self.layouts[0] == self.layouts[1]
        return not self.problems and (
            self.same_bits or (not same_layout and self.deviation < TOLERANCE)
        )

    def to_dict(self) -> dict[str, Any]:
        return {**self.__dict__, "holds": self.holds, "tolerance": TOLERANCE}


def certify_resume(argv: tuple[str, ...], steps: int, ranks: int, then_ranks: int) -> Certificate:
    """Run the script whole, then killed and resumed, and compare."""
    half = steps // 2
    every = max(1, half // 4)
    settings = (f"max_steps={steps}", f"checkpoint.every_steps={every}")
    setting = Setting(argv, ranks, forced=settings)
    with tempfile.TemporaryDirectory(prefix="certificate-") as scratch:
        whole, killed = Path(scratch) / "whole", Path(scratch) / "killed"
        problems = run_once(setting, Faults(), whole).problems
        _check_parser(argv[0], settings, problems)
        if not problems:
            faults = Faults().kill_at(half, rank=ranks - 1)
            if ranks == then_ranks:
                problems = run_once(setting, faults, killed).problems
            else:
                stays_down = replace(setting, flags=("--max-restarts=0",))
                run_once(stays_down, faults, killed)
                problems = run_once(replace(setting, ranks=then_ranks), Faults(), killed).problems
            # a script whose data differs at each start is refused when it resumes
            certificate = _certificate(argv, steps, half, (ranks, then_ranks), problems)
            if not problems:
                certificate = _compared(certificate, whole, killed)
            if certificate.holds:
                return certificate
            return replace(certificate, repeats=_repeats(setting, whole, Path(scratch) / "again"))
        return _certificate(argv, steps, half, (ranks, then_ranks), problems)


def _compared(certificate: Certificate, whole: Path, killed: Path) -> Certificate:
    problems = checkpoint_problems(killed / "run")
    try:
        same_bits = weights_fingerprint(whole / "run") == weights_fingerprint(killed / "run")
    except NoFinalWeights as error:
        same_bits, problems = False, [*problems, str(error)]
    return replace(
        certificate,
        problems=tuple(problems),
        resumed_from=_resumed_from(killed),
        same_bits=same_bits,
        deviation=_deviation(whole / "run", killed / "run", certificate.killed_after),
    )


def _repeats(setting: Setting, whole: Path, again: Path) -> bool | None:
    """Return whether a second run without a fault has the same weights; None if unknown."""
    try:
        expected = weights_fingerprint(whole / "run")
        if run_once(setting, Faults(), again).problems:
            return None
        return weights_fingerprint(again / "run") == expected
    except NoFinalWeights:
        return None


def _check_parser(script: str, settings: tuple[str, ...], problems: Sequence[str]) -> None:
    """Raise ConfigError if the script's own parser rejects the arguments that are added here."""
    was_usage_error = any(f"exit codes [{ConfigError.exit_code}]" in each for each in problems)
    problem = settings_problem(script, settings) if was_usage_error else None
    if problem is not None:
        raise ConfigError([problem])


def _certificate(
    argv: tuple[str, ...], steps: int, half: int, layouts: tuple[int, int], problems: list[str]
) -> Certificate:
    return Certificate(argv[0], steps, half, 0, layouts, False, float("nan"), tuple(problems))


def _resumed_from(folder: Path) -> int:
    claims = sorted((folder / "run" / "checkpoints").glob("attempt-*.json"))
    found = re.search(r'"resumed_step": (\d+)', claims[-1].read_text())
    return int(found[1]) if found else 0


def _deviation(whole: Path, killed: Path, half: int) -> float:
    first, second = _losses(whole), _losses(killed)
    steps = [step for step in first if step > half and step in second]
    return max((abs(first[s] - second[s]) / abs(first[s]) for s in steps), default=float("nan"))


def _losses(run: Path) -> dict[int, float]:
    return {step: float(values["train/loss"]) for step, values in step_scalars(run).items()}
