"""All facts of this host: its software, hardware, limits and variables."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import socket
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from drivetrain._version import __version__
from drivetrain.core import memory
from drivetrain.core.redaction import without_secrets
from drivetrain.doctor import network
from drivetrain.doctor.facts import Adapter, HostDevice, HostFacts, HostLimits
from drivetrain.doctor.network import port_use
from drivetrain.doctor.storage import probe

# Installed software, without importing any of it: torch alone would take seconds.

_PACKAGES = (
    "torch",
    "numpy",
    "torchdata",
    "torchft",
    "deepspeed",
    "horovod",
    "ray",
    "transformers",
    "tensorflow",
    "fsspec",
    "s3fs",
    "kubernetes",
)
_NCCL = re.compile(r"nvidia-nccl-cu\d+$")
_CUDA = re.compile(r"^cuda\b[^=]*= *['\"]([\d.]+)['\"]", re.MULTILINE)


def installed() -> dict[str, str]:
    """Return the versions of the software that a run depends on."""
    found = {"python": platform.python_version(), "drivetrain": __version__}
    for distribution in metadata.distributions():
        name = (distribution.metadata["Name"] or "").lower()
        if name in _PACKAGES:
            found.setdefault(name, distribution.version)
        elif _NCCL.match(name):
            found.setdefault("nccl", distribution.version)
    if cuda := _cuda_of_torch():
        found["cuda (of torch)"] = cuda
    found["kernel"] = platform.release()
    libc = platform.libc_ver()
    found["libc"] = " ".join(part for part in libc if part) or "unknown"
    return found


def _cuda_of_torch() -> str | None:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    match = _CUDA.search(text)
    return match[1] if match else None


# GPUs, fast network adapters and limits of this host.

SHM = "/dev/shm"  # noqa: S108 - what is asked is its size
_AMAZON = "0x1d0f"
_NVIDIA_SMI = ("--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits")
_MODULES = ("nvidia", "nvidia_peermem", "nv_peer_mem", "gdrdrv", "efa", "mlx5_ib", "ib_core")


def devices() -> tuple[HostDevice, ...]:
    """Return the GPUs that nvidia-smi lists; none without a driver."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    try:
        result = subprocess.run(
            [tool, *_NVIDIA_SMI], capture_output=True, text=True, check=True, timeout=20
        )
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(_device(line) for line in result.stdout.splitlines() if line.count(",") == 2)


def _device(line: str) -> HostDevice:
    name, memory, driver = (part.strip() for part in line.split(","))
    return HostDevice(name, int(memory) if memory.isdigit() else 0, driver)


def adapters(folder: Path = Path("/sys/class/infiniband")) -> tuple[Adapter, ...]:
    """Return InfiniBand, RoCE and EFA adapters, told apart by vendor and link layer."""
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return ()
    return tuple(_adapter(folder / name) for name in names)


def _adapter(folder: Path) -> Adapter:
    port = folder / "ports" / "1"
    if _read(folder / "device" / "vendor") == _AMAZON:
        kind = "efa"
    else:
        kind = "roce" if _read(port / "link_layer") == "Ethernet" else "infiniband"
    # "4: ACTIVE"; EFA has no state file on old kernels
    state = _read(port / "state")
    return Adapter(folder.name, kind, _read(port / "rate"), not state or "ACTIVE" in state)


def modules() -> tuple[str, ...]:
    """Return the loaded kernel modules that are relevant for GPU traffic."""
    loaded = {line.split()[0] for line in _read(Path("/proc/modules")).splitlines() if line}
    return tuple(name for name in _MODULES if name in loaded)


def limits() -> HostLimits:
    """Return the soft limits, which a process gets unless it asks for more."""
    import resource

    def soft(which: int) -> int | None:
        value = resource.getrlimit(which)[0]
        return None if value == resource.RLIM_INFINITY else value

    return HostLimits(
        soft(resource.RLIMIT_NOFILE), soft(resource.RLIMIT_MEMLOCK), soft(resource.RLIMIT_NPROC)
    )


def num_cores() -> int:
    """Return the number of cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


# All facts of this host, gathered at once.

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
    """Gather this host's facts; `ports` and `places` are those the run will use."""
    name = socket.gethostname()
    shm_total, shm_free = _shared_memory()
    return HostFacts(
        name=name,
        versions=installed(),
        devices=devices(),
        adapters=adapters(),
        interfaces=network.interfaces(),
        own_addresses=network.resolve(name),
        variables=steering_variables(),
        limits=limits(),
        shm_total_bytes=shm_total,
        shm_free_bytes=shm_free,
        num_cores=num_cores(),
        memory_bytes=memory.machine_bytes(),
        memory_limit_bytes=memory.limit_bytes(),
        ports=tuple(port_use(port) for port in ports),
        storage=tuple(probe(place) for place in places),
        modules=modules(),
    )


def steering_variables() -> dict[str, str]:
    """Return the environment variables that affect a run, without secrets."""
    chosen = {name: text for name, text in os.environ.items() if name.startswith(_STEERING)}
    return without_secrets(dict(sorted(chosen.items())))


def _shared_memory() -> tuple[int | None, int | None]:
    try:
        usage = shutil.disk_usage(SHM)
    except OSError:
        return None, None
    return usage.total, usage.free
