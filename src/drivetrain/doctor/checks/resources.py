"""Limits and shared memory."""

from __future__ import annotations

from collections.abc import Iterator

from drivetrain.core.finding import Finding
from drivetrain.core.text import readable_bytes
from drivetrain.doctor.checks.devices import num_visible
from drivetrain.doctor.facts import Examination, HostFacts
from drivetrain.doctor.hardware import SHM

# The store's server keeps a socket or two for every rank; loaders, libraries and shards need some.
_FEWEST_FILES, _FILES_PER_RANK = 1024, 4
_FEWEST_PROCESSES = 1024
# Loader processes hand over batches in it, NCCL its buffers; containers get 64 MiB unless asked.
_LEAST_SHM_BYTES = 512 * 2**20
_LEAST_SHM_FREE = 0.1


def check(examination: Examination) -> Iterator[Finding]:
    """On each host; how much is needed depends on how many ranks there will be."""
    num_ranks = sum(max(1, num_visible(host)) for host in examination.hosts)
    for host in examination.hosts:
        yield from _files(host, num_ranks)
        yield from _processes(host)
        yield from _locked_memory(host)
        yield from _shared_memory(host)


def _files(host: HostFacts, num_ranks: int) -> Iterator[Finding]:
    least = max(_FEWEST_FILES, _FILES_PER_RANK * num_ranks)
    limit = host.limits.open_files
    if limit is not None and limit < least:
        yield Finding(
            "limits",
            "error",
            (host.name,),
            "too few open files are allowed: ranks and loaders would fail with EMFILE",
            f"ulimit -n is {limit}; {num_ranks} ranks want {least}",
            "ulimit -n 65536 in the shell or job script; for good, 'nofile' in"
            " /etc/security/limits.conf, LimitNOFILE= of the scheduler's service, or the"
            " container's --ulimit nofile=65536",
        )


def _processes(host: HostFacts) -> Iterator[Finding]:
    limit = host.limits.processes
    if limit is not None and limit < _FEWEST_PROCESSES:
        yield Finding(
            "limits",
            "error",
            (host.name,),
            "too few processes and threads are allowed",
            f"ulimit -u is {limit}",
            "ulimit -u 65536, or 'nproc' in /etc/security/limits.conf",
        )


def _locked_memory(host: HostFacts) -> Iterator[Finding]:
    limit = host.limits.locked_memory_bytes
    if host.adapters and limit is not None:
        yield Finding(
            "limits",
            "error",
            (host.name,),
            "locked memory is limited: buffers cannot be registered with the network adapter",
            f"ulimit -l is {readable_bytes(limit)}; there is {host.adapters[0].name}",
            "ulimit -l unlimited; 'memlock unlimited' in /etc/security/limits.conf, or the"
            " container's --ulimit memlock=-1",
        )


def _shared_memory(host: HostFacts) -> Iterator[Finding]:
    total, free = host.shm_total_bytes, host.shm_free_bytes
    if total is None or free is None:
        return
    if total < _LEAST_SHM_BYTES:
        yield Finding(
            "shared memory",
            "error",
            (host.name,),
            f"{SHM} is tiny: loader processes die with a bus error, NCCL cannot make its buffers",
            f"{readable_bytes(total)} at {SHM}; {readable_bytes(_LEAST_SHM_BYTES)} is the least",
            "docker run --shm-size=8g or --ipc=host; in Kubernetes an emptyDir with medium: Memory"
            " at /dev/shm; else mount -o remount,size=8g /dev/shm",
        )
    elif free < total * _LEAST_SHM_FREE:
        yield Finding(
            "shared memory",
            "warning",
            (host.name,),
            f"{SHM} is nearly full",
            f"{readable_bytes(free)} of {readable_bytes(total)} free",
            "ls -la /dev/shm: delete what no process has open any more (fuser -v /dev/shm/*)",
        )
