"""Checks of each host: GPUs, limits, shared memory, storage and clock."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from drivetrain.core.finding import EnvironmentFinding
from drivetrain.core.text import readable_bytes
from drivetrain.doctor.facts import Examination, HostFacts, StorageProbe, odd_ones
from drivetrain.doctor.host import SHM

# GPUs: the same number and model on every host, and none hidden by mistake.


def check_devices(examination: Examination) -> Iterator[EnvironmentFinding]:
    """Compare GPU counts with the expected one, or else between hosts; compare models."""
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
            yield EnvironmentFinding(
                "devices",
                "warning",
                (host,),
                "a different GPU model: every step waits for the slowest",
                f"{model} here, {usual_model} on most",
                "exclude the host, or run on hosts with the same GPU model",
            )


def _count(examination: Examination, name: str, count: int, wanted: int) -> EnvironmentFinding:
    host = next(host for host in examination.hosts if host.name == name)
    hidden = host.variables.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and len(host.devices) >= wanted:
        fix = f"unset CUDA_VISIBLE_DEVICES on {name}, or list {wanted} devices in it"
    else:
        fix = (
            f"see `nvidia-smi` and `dmesg | grep -i xid` on {name}, or use --nproc-per-node {count}"
        )
    return EnvironmentFinding(
        "devices",
        "error",
        (name,),
        f"{count} GPUs where {wanted} were expected: ranks would be missing",
        f"nvidia-smi lists {len(host.devices)}, CUDA_VISIBLE_DEVICES={hidden or '(not set)'}",
        fix,
    )


def num_visible(host: HostFacts) -> int:
    """Return how many GPUs a process sees: CUDA stops at the first invalid index."""
    listed = host.variables.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return len(host.devices)
    count = 0
    for word in filter(None, (part.strip() for part in listed.split(","))):
        if word.lstrip("-").isdigit() and not 0 <= int(word) < len(host.devices):
            break
        count += 1
    return min(count, len(host.devices))


# Limits and shared memory.

# The store's server has a socket or two per rank; loaders, libraries and shards need more.
_FEWEST_FILES, _FILES_PER_RANK = 1024, 4
_FEWEST_PROCESSES = 1024
# Loader processes pass batches through it, NCCL its buffers; a container's default is 64 MiB.
_LEAST_SHM_BYTES = 512 * 2**20
_LEAST_SHM_FREE = 0.1


def check_resources(examination: Examination) -> Iterator[EnvironmentFinding]:
    """Check each host's limits; some depend on the number of ranks."""
    num_ranks = sum(max(1, num_visible(host)) for host in examination.hosts)
    for host in examination.hosts:
        yield from _files(host, num_ranks)
        yield from _processes(host)
        yield from _locked_memory(host)
        yield from _shared_memory(host)


def _files(host: HostFacts, num_ranks: int) -> Iterator[EnvironmentFinding]:
    least = max(_FEWEST_FILES, _FILES_PER_RANK * num_ranks)
    limit = host.limits.open_files
    if limit is not None and limit < least:
        yield EnvironmentFinding(
            "limits",
            "error",
            (host.name,),
            "the limit on open files is too low: ranks and data loaders would fail with EMFILE",
            f"ulimit -n is {limit}; {num_ranks} ranks need {least}",
            "ulimit -n 65536 in the shell or job script; permanently: 'nofile' in"
            " /etc/security/limits.conf, LimitNOFILE= of the scheduler's service, or the"
            " container's --ulimit nofile=65536",
        )


def _processes(host: HostFacts) -> Iterator[EnvironmentFinding]:
    limit = host.limits.processes
    if limit is not None and limit < _FEWEST_PROCESSES:
        yield EnvironmentFinding(
            "limits",
            "error",
            (host.name,),
            "the limit on processes and threads is too low",
            f"ulimit -u is {limit}",
            "ulimit -u 65536, or 'nproc' in /etc/security/limits.conf",
        )


def _locked_memory(host: HostFacts) -> Iterator[EnvironmentFinding]:
    limit = host.limits.locked_memory_bytes
    if host.adapters and limit is not None:
        yield EnvironmentFinding(
            "limits",
            "error",
            (host.name,),
            "locked memory is limited: buffers cannot be registered with the network adapter",
            f"ulimit -l is {readable_bytes(limit)}; the host has {host.adapters[0].name}",
            "ulimit -l unlimited; 'memlock unlimited' in /etc/security/limits.conf, or the"
            " container's --ulimit memlock=-1",
        )


def _shared_memory(host: HostFacts) -> Iterator[EnvironmentFinding]:
    total, free = host.shm_total_bytes, host.shm_free_bytes
    if total is None or free is None:
        return
    if total < _LEAST_SHM_BYTES:
        yield EnvironmentFinding(
            "shared memory",
            "error",
            (host.name,),
            f"{SHM} is too small: loader processes crash (SIGBUS), NCCL cannot get its buffers",
            f"{readable_bytes(total)} at {SHM}; {readable_bytes(_LEAST_SHM_BYTES)} are required",
            "docker run --shm-size=8g or --ipc=host; in Kubernetes an emptyDir with medium: Memory"
            " at /dev/shm; else mount -o remount,size=8g /dev/shm",
        )
    elif free < total * _LEAST_SHM_FREE:
        yield EnvironmentFinding(
            "shared memory",
            "warning",
            (host.name,),
            f"{SHM} is nearly full",
            f"{readable_bytes(free)} of {readable_bytes(total)} free",
            "ls -la /dev/shm: delete files that no process has open (fuser -v /dev/shm/*)",
        )


# Where the run writes: is it writable, is there space, and do all hosts see the same?

_LEAST_FREE_BYTES, _LEAST_FREE = 2 * 2**30, 0.02


def check_storage(examination: Examination) -> Iterator[EnvironmentFinding]:
    """Check every place on every host."""
    for host in examination.hosts:
        for probe in host.storage:
            yield from _place(host.name, probe)
    unseen = tuple(host for host, is_seen in examination.sees_token.items() if not is_seen)
    if unseen:
        first = examination.hosts[0].name
        yield EnvironmentFinding(
            "storage",
            "error",
            unseen,
            f"the run directory is not the one {first} sees: nodes could not rendezvous, and a"
            " checkpoint would be split across machines",
            f"a file written on {first} is not visible here",
            "mount the same shared file system under this path, or keep checkpoints in an object"
            " store (checkpoint.directory=s3://…) and use --rdzv-endpoint",
        )


def _place(host: str, probe: StorageProbe) -> Iterator[EnvironmentFinding]:
    if probe.failed_at is not None:
        what, fix = _failed(probe)
        evidence = f"{probe.failed_at}: {probe.error}"
        if probe.free_bytes is not None:
            evidence += f" ({readable_bytes(probe.free_bytes)} free)"
        yield EnvironmentFinding("storage", "error", (host,), what, evidence, fix)
        return
    free, total = probe.free_bytes, probe.total_bytes
    if free is None or total is None:
        return
    if free < max(_LEAST_FREE_BYTES, total * _LEAST_FREE):
        yield EnvironmentFinding(
            "storage",
            "warning",
            (host,),
            f"{probe.address} is nearly full: a checkpoint may not fit",
            f"{readable_bytes(free)} of {readable_bytes(total)} free",
            "free some space, or lower checkpoint.keep_last",
        )


def _failed(probe: StorageProbe) -> tuple[str, str]:
    place = probe.address
    if "://" in place:
        return (
            f"the store {place} cannot be used: checkpoints would be lost",
            "check its address (AWS_ENDPOINT_URL), the credentials, the bucket's policy, and that"
            " this host may connect to it",
        )
    if "ENOSPC" in probe.error or "EDQUOT" in probe.error:
        return (
            f"the disk of {place} is full",
            "delete old runs and checkpoints, or use another disk",
        )
    if "EROFS" in probe.error or "EACCES" in probe.error or "EPERM" in probe.error:
        return (
            f"{place} is read-only here",
            "mount it writable (check with `mount | grep`), check its owner (`ls -ld`), or"
            " choose another --run-dir",
        )
    return f"{place} does not keep what is written to it", "check that host's system log"


# Clocks: rendezvous heartbeats, tokens and logs all compare times of different hosts.

# The first makes two hosts' logs hard to compare. The second: nodes that rendezvous in a directory
# judge by each other's time stamps who is alive, for three intervals of five seconds.
_NOTICEABLE_S, _HARMFUL_S = 0.5, 5.0


def check_clocks(examination: Examination) -> Iterator[EnvironmentFinding]:
    """Compare with the median clock; with only two hosts it is unknown which one is wrong."""
    if len(examination.clocks) < 2:
        return
    offsets = sorted(clock.offset_s for clock in examination.clocks)
    middle = median(offsets) if len(offsets) > 2 else offsets[0]
    for clock in examination.clocks:
        skew_s = clock.offset_s - middle
        surely_s = abs(skew_s) - 2 * clock.uncertainty_s
        if surely_s < _NOTICEABLE_S:
            continue
        yield EnvironmentFinding(
            "clock",
            "error" if surely_s > _HARMFUL_S else "warning",
            (clock.host,),
            f"its clock is {abs(skew_s):.1f} s {'ahead' if skew_s > 0 else 'behind'}:"
            " heartbeats look old or come from the future",
            f"offset {clock.offset_s:+.2f} s from the client's, ± {clock.uncertainty_s:.2f} s;"
            f" the others' {middle:+.2f} s",
            f"start chronyd or systemd-timesyncd on {clock.host}; `chronyc makestep` sets it now",
        )
