"""Where the run writes: can it, is there room, and do all hosts see the same?"""

from __future__ import annotations

from collections.abc import Iterator

from drivetrain.core.finding import Finding
from drivetrain.core.text import readable_bytes
from drivetrain.doctor.facts import Examination, StorageProbe

_LEAST_FREE_BYTES, _LEAST_FREE = 2 * 2**30, 0.02


def check(examination: Examination) -> Iterator[Finding]:
    """Every place on every host."""
    for host in examination.hosts:
        for probe in host.storage:
            yield from _place(host.name, probe)
    unseen = tuple(host for host, is_seen in examination.sees_token.items() if not is_seen)
    if unseen:
        first = examination.hosts[0].name
        yield Finding(
            "storage",
            "error",
            unseen,
            f"the run's directory is not the one {first} sees: nodes could not meet, and a"
            " checkpoint would be in pieces on different machines",
            f"a file written on {first} is not there",
            "mount the same shared file system under this path, or keep checkpoints in an object"
            " store (checkpoint.directory=s3://…) and meet by --rdzv-endpoint",
        )


def _place(host: str, probe: StorageProbe) -> Iterator[Finding]:
    if probe.failed_at is not None:
        what, fix = _failed(probe)
        evidence = f"{probe.failed_at}: {probe.error}"
        if probe.free_bytes is not None:
            evidence += f" ({readable_bytes(probe.free_bytes)} free)"
        yield Finding("storage", "error", (host,), what, evidence, fix)
        return
    free, total = probe.free_bytes, probe.total_bytes
    if free is None or total is None:
        return
    if free < max(_LEAST_FREE_BYTES, total * _LEAST_FREE):
        yield Finding(
            "storage",
            "warning",
            (host,),
            f"{probe.address} is nearly full: a checkpoint may not fit",
            f"{readable_bytes(free)} of {readable_bytes(total)} free",
            "free some, or lower checkpoint.keep_last",
        )


def _failed(probe: StorageProbe) -> tuple[str, str]:
    place = probe.address
    if "://" in place:
        return (
            f"the store {place} cannot be used: checkpoints would be lost",
            "see its address (AWS_ENDPOINT_URL), the credentials, the bucket's policy, and that"
            " this host is let through to it",
        )
    if "ENOSPC" in probe.error or "EDQUOT" in probe.error:
        return f"the disk of {place} is full", "delete old runs and checkpoints, or take another"
    if "EROFS" in probe.error or "EACCES" in probe.error or "EPERM" in probe.error:
        return (
            f"{place} is read-only here",
            "mount it writable (`mount | grep` shows how it is), see its owner (`ls -ld`), or"
            " choose another --run-dir",
        )
    return f"{place} does not keep what is written to it", "see the system's log of that host"
