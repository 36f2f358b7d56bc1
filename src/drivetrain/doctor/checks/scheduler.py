"""Variables a scheduler should have set, against those that are there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from drivetrain.core.finding import Finding
from drivetrain.doctor.checks.among import odd_ones
from drivetrain.doctor.facts import Examination, HostFacts

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# Target → what has to be there, and how one gets it.
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
        "start it by srun inside the job, and pass the environment on (no --export=NONE)",
    ),
    "kubernetes": (
        ("KUBERNETES_SERVICE_HOST",),
        "run it in a pod of the job; `kubectl describe pod` shows its environment",
    ),
    "ray": (
        ("RAY_RAYLET_PID",),
        "run it in a Ray task or job (ray job submit), not beside it",
    ),
    "torchrun": (_TORCHRUN, "start it by torchrun or `drivetrain train`"),
}
_MAIN = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "SLURM_JOB_ID", "SLURM_NTASKS")


def check(examination: Examination) -> Iterator[Finding]:
    """What the target promises, then what contradicts itself wherever it came from."""
    for host in examination.hosts:
        if examination.target in _EXPECTED:
            yield from _missing(host, examination.target)
        yield from _half_set(host)
    for name in _MAIN:
        found = {h.name: h.variables[name] for h in examination.hosts if name in h.variables}
        if differing := odd_ones(found):
            usual, others = differing
            for odd, value in others.items():
                yield Finding(
                    "scheduler",
                    "error",
                    (odd,),
                    f"{name} is not the same on all hosts: they would never meet",
                    f"{name}={value} here, {usual} on most",
                    f"unset it in start-up files (~/.bashrc), or export {name}={usual}",
                )


def _missing(host: HostFacts, target: str) -> Iterator[Finding]:
    names, fix = _EXPECTED[target]
    missing = [name for name in names if name not in host.variables]
    if missing:
        there = [name for name in names if name in host.variables]
        yield Finding(
            "scheduler",
            "error",
            (host.name,),
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set: ranks would not"
            " know who they are",
            f"found {', '.join(there) or 'none'} of {len(names)} variables {target} sets",
            fix,
        )


def _half_set(host: HostFacts) -> Iterator[Finding]:
    """RANK without WORLD_SIZE, left over in a shell, turns one process into a lost rank."""
    variables: Mapping[str, str] = host.variables
    there = [name for name in ("RANK", "WORLD_SIZE") if name in variables]
    if len(there) == 1 and "KUBERNETES_SERVICE_HOST" not in variables:
        missing = "WORLD_SIZE" if there == ["RANK"] else "RANK"
        yield Finding(
            "scheduler",
            "error",
            (host.name,),
            f"{there[0]} is set and {missing} is not: left over from another start",
            f"{there[0]}={variables[there[0]]}",
            f"unset {there[0]}",
        )
