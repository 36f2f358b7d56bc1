"""Checks of software and settings that must agree: versions, scheduler variables, timeouts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from drivetrain.core.errors import Problem
from drivetrain.core.finding import EnvironmentFinding, Severity
from drivetrain.doctor.facts import Examination, HostFacts, odd_ones

# Software that must be the same on all hosts, and parts that must be compatible on each.

# Ranks with different versions of these cannot communicate, or compute different numbers.
_SAME: dict[str, tuple[Severity, str]] = {
    "python": ("error", "one may be unable to unpickle what the other pickles"),
    "torch": ("error", "ranks could not communicate, or would compute different numbers"),
    "drivetrain": ("error", "supervisors must agree on the rendezvous and on what they save"),
    "nccl": ("error", "NCCL refuses peers of another version"),
    "cuda (of torch)": ("error", "kernels differ, and so do the numbers"),
    "deepspeed": ("error", "ranks would not agree on their shards"),
    "horovod": ("error", "its coordinator refuses peers of another version"),
    "ray": ("error", "Ray refuses peers of another version"),
    "numpy": ("warning", "random streams and rounding may differ"),
    "transformers": ("warning", "the same model class may compute something else"),
}
_LEAST_TORCH = (2, 9)
# The oldest driver for each major CUDA version, from NVIDIA's table.
_LEAST_DRIVER = {11: 450, 12: 525, 13: 580}


def check_versions(examination: Examination) -> Iterator[EnvironmentFinding]:
    """Compare versions between hosts, then check compatibility on each."""
    for name, (severity, reason) in _SAME.items():
        found = {host.name: host.versions.get(name, "none") for host in examination.hosts}
        if differing := odd_ones(found):
            usual, others = differing
            for odd, version in others.items():
                yield EnvironmentFinding(
                    "versions",
                    severity,
                    (odd,),
                    f"{name} differs from the other hosts': {reason}",
                    f"{name} {version} here, {usual} on most",
                    _same_fix(name, usual),
                )
    for host in examination.hosts:
        yield from _torch(host)
        yield from _driver(host)


def _same_fix(name: str, usual: str) -> str:
    if name in ("python", "cuda (of torch)", "nccl"):
        return f"use the same environment or image on all hosts ({name} {usual})"
    if usual == "none":
        return f"uninstall {name} there, or install it everywhere"
    return f"pip install '{name}=={usual}', or use one environment or image on all hosts"


def _torch(host: HostFacts) -> Iterator[EnvironmentFinding]:
    version = host.versions.get("torch")
    if version is None:
        evidence = f"torch is not installed for Python {host.versions['python']}"
        yield EnvironmentFinding(
            "versions", "error", (host.name,), "torch is missing", evidence, "pip install torch"
        )
    elif _numbers(version) < _LEAST_TORCH:
        yield EnvironmentFinding(
            "versions",
            "error",
            (host.name,),
            "torch is too old",
            f"torch {version}",
            f"pip install 'torch>={'.'.join(map(str, _LEAST_TORCH))}'",
        )
    elif host.devices and "cuda (of torch)" not in host.versions:
        yield EnvironmentFinding(
            "versions",
            "error",
            (host.name,),
            "torch was built without CUDA: the GPUs would be idle",
            f"{len(host.devices)} × {host.devices[0].name}, torch {version}",
            "install the CUDA build of torch (pytorch.org, Get Started)",
        )


def _driver(host: HostFacts) -> Iterator[EnvironmentFinding]:
    cuda = host.versions.get("cuda (of torch)")
    if not host.devices or cuda is None:
        return
    least = _LEAST_DRIVER.get(_numbers(cuda)[0])
    driver = host.devices[0].driver
    if least is not None and _numbers(driver)[0] < least:
        yield EnvironmentFinding(
            "versions",
            "error",
            (host.name,),
            "the driver is too old for torch's CUDA",
            f"driver {driver}, CUDA {cuda}",
            f"install driver {least} or newer, or a torch built for an older CUDA",
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2]) or (0,)


# Variables that a scheduler should have set, compared with those that exist.

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# Target → the variables it sets, and how to get them.
_EXPECTED: dict[str, tuple[tuple[str, ...], str]] = {
    "slurm": (
        (
            "SLURM_JOB_ID",
            "SLURM_PROCID",
            "SLURM_LOCALID",
            "SLURM_NODEID",
            "SLURM_NTASKS",
            "SLURM_STEP_ID",
            "SLURM_STEP_NODELIST",
        ),
        "start it with srun inside the job, and pass the environment on (no --export=NONE)",
    ),
    "kubernetes": (
        ("KUBERNETES_SERVICE_HOST",),
        "run it in a pod of the job; `kubectl describe pod` shows its environment",
    ),
    "ray": (
        ("RAY_RAYLET_PID",),
        "run it in a Ray task or job (ray job submit), not beside it",
    ),
    "torchrun": (_TORCHRUN, "start it with torchrun or `drivetrain train`"),
}
_MAIN = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "SLURM_JOB_ID", "SLURM_NTASKS")


def target_problem(target: str) -> Problem | None:
    """Return what is wrong with the name of a target that is to be checked."""
    if target in _EXPECTED:
        return None
    return Problem("--on", "unknown", f"use {', '.join(_EXPECTED)}", target)


def check_scheduler(examination: Examination) -> Iterator[EnvironmentFinding]:
    """Check the variables that the target sets, then any that contradict each other."""
    for host in examination.hosts:
        if examination.target in _EXPECTED:
            yield from _missing(host, examination.target)
        yield from _half_set(host)
    for name in _MAIN:
        found = {h.name: h.variables[name] for h in examination.hosts if name in h.variables}
        if differing := odd_ones(found):
            usual, others = differing
            for odd, value in others.items():
                yield EnvironmentFinding(
                    "scheduler",
                    "error",
                    (odd,),
                    f"{name} is not the same on all hosts: the rendezvous would never complete",
                    f"{name}={value} here, {usual} on most",
                    f"unset it in start-up files (~/.bashrc), or export {name}={usual}",
                )


def _missing(host: HostFacts, target: str) -> Iterator[EnvironmentFinding]:
    names, fix = _EXPECTED[target]
    missing = [name for name in names if name not in host.variables]
    if missing:
        there = [name for name in names if name in host.variables]
        yield EnvironmentFinding(
            "scheduler",
            "error",
            (host.name,),
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set: processes"
            " would not know their rank",
            f"found {', '.join(there) or 'none'} of {len(names)} variables {target} sets",
            fix,
        )


def _half_set(host: HostFacts) -> Iterator[EnvironmentFinding]:
    """Find RANK without WORLD_SIZE, or the reverse, which makes one process act as a lone rank."""
    variables: Mapping[str, str] = host.variables
    there = [name for name in ("RANK", "WORLD_SIZE") if name in variables]
    if len(there) == 1 and "KUBERNETES_SERVICE_HOST" not in variables:
        missing = "WORLD_SIZE" if there == ["RANK"] else "RANK"
        yield EnvironmentFinding(
            "scheduler",
            "error",
            (host.name,),
            f"{there[0]} is set and {missing} is not: left over from an earlier launch",
            f"{there[0]}={variables[there[0]]}",
            f"unset {there[0]}",
        )


# Timeouts that contradict each other.

# With one second and two attempts, two agents have formed two worlds of one node each.
_LEAST_KEEP_ALIVE_S = 6.0
# From SIGTERM to the supervisor, through it to the ranks, and back.
_MARGIN_S = 5.0


def check_timeouts(examination: Examination) -> Iterator[EnvironmentFinding]:
    """Compare pairs of timeouts and report what would happen."""
    times = examination.timeouts
    if times.stall_s >= times.collective_s:
        yield _finding(
            "collectives would time out before a stall is noticed:"
            " the stacks that explain a hang would never be collected",
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
            "the scheduler kills the run before it has finished saving",
            f"the target waits {times.target_grace_s:g} s after SIGTERM,"
            f" --grace-period is {times.grace_s:g} s",
            f"--grace-period {max(5.0, times.target_grace_s - _MARGIN_S):g}, or make it wait"
            f" {times.grace_s + _MARGIN_S:g} s (Slurm: KillWait or --signal=B:TERM@…;"
            " Kubernetes: terminationGracePeriodSeconds)",
        )
    if times.keep_alive_s is not None and times.keep_alive_s < _LEAST_KEEP_ALIVE_S:
        yield _finding(
            "a node that is silent for a moment counts as dead, and the job may split into two"
            " worlds",
            f"keep_alive_interval × keep_alive_max_attempt = {times.keep_alive_s:g} s",
            "--rdzv-conf keep_alive_interval=5,keep_alive_max_attempt=3",
        )


def _finding(what: str, evidence: str, fix: str) -> EnvironmentFinding:
    return EnvironmentFinding("time-outs", "error", (), what, evidence, fix)
