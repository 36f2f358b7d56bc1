"""Time-outs that contradict each other."""

from __future__ import annotations

from collections.abc import Iterator

from drivetrain.core.finding import Finding
from drivetrain.doctor.facts import Examination

# With one second and two tries, two agents were seen to form two worlds of one node each.
_LEAST_KEEP_ALIVE_S = 6.0
# From SIGTERM to the supervisor, through it to the ranks, and back.
_MARGIN_S = 5.0


def check(examination: Examination) -> Iterator[Finding]:
    """Each rule compares two numbers and says what would happen."""
    times = examination.timeouts
    if times.stall_s >= times.collective_s:
        yield _finding(
            "a stalled rank would be cut off before anybody has looked at it:"
            " the stacks that explain a hang are never taken",
            f"--stall-timeout {times.stall_s:g} ≥ parallel.timeout_s {times.collective_s:g}",
            f"--stall-timeout {times.collective_s / 2:g},"
            f" or parallel.timeout_s={2 * times.stall_s:g}",
        )
    if times.slow_s < times.stall_s:
        yield _finding(
            "starting and saving would get less time than a step",
            f"--slow-timeout {times.slow_s:g} < --stall-timeout {times.stall_s:g}",
            f"--slow-timeout {max(900.0, 2 * times.stall_s):g}",
        )
    if times.target_grace_s is not None and times.target_grace_s < times.grace_s + _MARGIN_S:
        yield _finding(
            "the scheduler kills before the run has finished saving",
            f"the target waits {times.target_grace_s:g} s after SIGTERM,"
            f" --grace-period is {times.grace_s:g} s",
            f"--grace-period {max(5.0, times.target_grace_s - _MARGIN_S):g}, or have it wait"
            f" {times.grace_s + _MARGIN_S:g} s (Slurm: KillWait or --signal=B:TERM@…;"
            " Kubernetes: terminationGracePeriodSeconds)",
        )
    if times.keep_alive_s is not None and times.keep_alive_s < _LEAST_KEEP_ALIVE_S:
        yield _finding(
            "a node that is silent for a moment counts as dead, and two halves may train as two"
            " worlds",
            f"keep_alive_interval × keep_alive_max_attempt = {times.keep_alive_s:g} s",
            "--rdzv-conf keep_alive_interval=5,keep_alive_max_attempt=3",
        )


def _finding(what: str, evidence: str, fix: str) -> Finding:
    return Finding("time-outs", "error", (), what, evidence, fix)
