"""GPUs: as many and as good on every host, and none hidden by mistake."""

from __future__ import annotations

from collections.abc import Iterator

from drivetrain.core.finding import Finding
from drivetrain.doctor.checks.among import odd_ones
from drivetrain.doctor.facts import Examination, HostFacts


def check(examination: Examination) -> Iterator[Finding]:
    """Against what is expected, or among the hosts."""
    counts = {host.name: num_visible(host) for host in examination.hosts}
    wanted = examination.expected.devices_per_node
    differing = odd_ones(counts)
    if wanted is not None:
        others = {host: count for host, count in counts.items() if count != wanted}
        yield from (_count(examination, host, count, wanted) for host, count in others.items())
    elif differing:
        usual, others = max(counts.values()), differing[1]
        others = {host: count for host, count in counts.items() if count != usual}
        yield from (_count(examination, host, count, usual) for host, count in others.items())
    models = {host.name: host.devices[0].name for host in examination.hosts if host.devices}
    if unlike := odd_ones(models):
        usual_model, odd = unlike
        for host, model in odd.items():
            yield Finding(
                "devices",
                "warning",
                (host,),
                "another kind of GPU: every step waits for the slowest",
                f"{model} here, {usual_model} on most",
                "leave the host out, or run on hosts of one kind",
            )


def _count(examination: Examination, name: str, count: int, wanted: int) -> Finding:
    host = next(host for host in examination.hosts if host.name == name)
    hidden = host.variables.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and len(host.devices) >= wanted:
        fix = f"unset CUDA_VISIBLE_DEVICES on {name}, or have it list {wanted} devices"
    else:
        fix = (
            f"see `nvidia-smi` and `dmesg | grep -i xid` on {name}, or use --nproc-per-node {count}"
        )
    return Finding(
        "devices",
        "error",
        (name,),
        f"{count} GPUs where {wanted} were expected: the world would have holes",
        f"nvidia-smi lists {len(host.devices)}, CUDA_VISIBLE_DEVICES={hidden or '(not set)'}",
        fix,
    )


def num_visible(host: HostFacts) -> int:
    """Those a process sees: CUDA stops at the first index that is not there."""
    listed = host.variables.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return len(host.devices)
    count = 0
    for word in filter(None, (part.strip() for part in listed.split(","))):
        if word.lstrip("-").isdigit() and not 0 <= int(word) < len(host.devices):
            break
        count += 1
    return min(count, len(host.devices))
