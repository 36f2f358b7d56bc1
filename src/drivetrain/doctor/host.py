"""All facts of this host, gathered at once."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Sequence

from drivetrain.core.redaction import without_secrets
from drivetrain.doctor import hardware, network, versions
from drivetrain.doctor.facts import HostFacts
from drivetrain.doctor.network import port_use
from drivetrain.doctor.storage import probe

_STEERING = (
    "CUDA_",
    "DRIVETRAIN_",
    "FI_",
    "GLOO_",
    "HOROVOD_",
    "JOB_COMPLETION_INDEX",
    "KUBERNETES_",
    "LD_LIBRARY_PATH",
    "LOCAL_",
    "MASTER_",
    "NCCL_",
    "NNODES",
    "NODE_RANK",
    "NVIDIA_",
    "OMP_",
    "PET_",
    "PYTHONPATH",
    "PYTORCH_",
    "RANK",
    "RAY_",
    "SLURM_",
    "TORCH",
    "WORLD_SIZE",
)


def host_facts(ports: Sequence[int] = (), places: Sequence[str] = ()) -> HostFacts:
    """What this host is like; `ports` and `places` are those the run will use."""
    name = socket.gethostname()
    shm_total, shm_free = _shared_memory()
    return HostFacts(
        name=name,
        versions=versions.installed(),
        devices=hardware.devices(),
        adapters=hardware.adapters(),
        interfaces=network.interfaces(),
        own_addresses=network.resolve(name),
        variables=steering_variables(),
        limits=hardware.limits(),
        shm_total_bytes=shm_total,
        shm_free_bytes=shm_free,
        num_cores=hardware.num_cores(),
        memory_bytes=hardware.memory_bytes(),
        memory_limit_bytes=hardware.memory_limit_bytes(),
        ports=tuple(port_use(port) for port in ports),
        storage=tuple(probe(place) for place in places),
        modules=hardware.modules(),
    )


def steering_variables() -> dict[str, str]:
    """Environment variables that change what a run does, without secrets."""
    chosen = {name: text for name, text in os.environ.items() if name.startswith(_STEERING)}
    return without_secrets(dict(sorted(chosen.items())))


def _shared_memory() -> tuple[int | None, int | None]:
    try:
        usage = shutil.disk_usage(hardware.SHM)
    except OSError:
        return None, None
    return usage.total, usage.free
