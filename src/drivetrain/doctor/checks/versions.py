"""Software that has to be the same on all hosts, and parts that have to fit each other on one."""

from __future__ import annotations

import re
from collections.abc import Iterator

from drivetrain.core.finding import Finding, Severity
from drivetrain.doctor.checks.among import odd_ones
from drivetrain.doctor.facts import Examination, HostFacts

# Ranks with different versions of these speak differently on the wire, or compute differently.
_SAME: dict[str, tuple[Severity, str]] = {
    "python": ("error", "what one pickles the other may not read"),
    "torch": ("error", "ranks would not understand each other, or differ in their numbers"),
    "drivetrain": ("error", "supervisors must agree on how they meet and what they save"),
    "nccl": ("error", "NCCL refuses peers of another version"),
    "cuda (of torch)": ("error", "kernels, and so numbers, differ"),
    "deepspeed": ("error", "ranks would not agree on their shards"),
    "horovod": ("error", "its coordinator refuses peers of another version"),
    "ray": ("error", "Ray refuses peers of another version"),
    "numpy": ("warning", "random streams and rounding may differ"),
    "transformers": ("warning", "the same model class may compute something else"),
}
_LEAST_TORCH = (2, 9)
# NVIDIA's table of the oldest driver each major CUDA runs on.
_LEAST_DRIVER = {11: 450, 12: 525, 13: 580}


def check(examination: Examination) -> Iterator[Finding]:
    """Between the hosts, then on each."""
    for name, (severity, reason) in _SAME.items():
        found = {host.name: host.versions.get(name, "none") for host in examination.hosts}
        if differing := odd_ones(found):
            usual, others = differing
            for odd, version in others.items():
                yield Finding(
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


def _torch(host: HostFacts) -> Iterator[Finding]:
    version = host.versions.get("torch")
    if version is None:
        evidence = f"no torch beside Python {host.versions['python']}"
        yield Finding(
            "versions", "error", (host.name,), "torch is missing", evidence, "pip install torch"
        )
    elif _numbers(version) < _LEAST_TORCH:
        yield Finding(
            "versions",
            "error",
            (host.name,),
            "torch is too old",
            f"torch {version}",
            f"pip install 'torch>={'.'.join(map(str, _LEAST_TORCH))}'",
        )
    elif host.devices and "cuda (of torch)" not in host.versions:
        yield Finding(
            "versions",
            "error",
            (host.name,),
            "torch was built without CUDA, and the GPUs would stand idle",
            f"{len(host.devices)} × {host.devices[0].name}, torch {version}",
            "install the CUDA build of torch (pytorch.org, Get Started)",
        )


def _driver(host: HostFacts) -> Iterator[Finding]:
    cuda = host.versions.get("cuda (of torch)")
    if not host.devices or cuda is None:
        return
    least = _LEAST_DRIVER.get(_numbers(cuda)[0])
    driver = host.devices[0].driver
    if least is not None and _numbers(driver)[0] < least:
        yield Finding(
            "versions",
            "error",
            (host.name,),
            "the driver is too old for torch's CUDA",
            f"driver {driver}, CUDA {cuda}",
            f"install driver {least} or newer, or a torch built for an older CUDA",
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2]) or (0,)
