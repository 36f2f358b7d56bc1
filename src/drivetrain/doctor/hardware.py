"""GPUs, fast network adapters and limits of this host."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from drivetrain.doctor.facts import Adapter, Device, Limits

SHM = "/dev/shm"  # noqa: S108 - what is asked is its size
_AMAZON = "0x1d0f"
_NVIDIA_SMI = ("--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits")
_MODULES = ("nvidia", "nvidia_peermem", "nv_peer_mem", "gdrdrv", "efa", "mlx5_ib", "ib_core")


def devices() -> tuple[Device, ...]:
    """The GPUs nvidia-smi lists; none without a driver."""
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


def _device(line: str) -> Device:
    name, memory, driver = (part.strip() for part in line.split(","))
    return Device(name, int(memory) if memory.isdigit() else 0, driver)


def adapters(folder: Path = Path("/sys/class/infiniband")) -> tuple[Adapter, ...]:
    """InfiniBand, RoCE and EFA all stand in the same place; who made them tells them apart."""
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
    """Those of the kernel's modules that GPU traffic needs."""
    loaded = {line.split()[0] for line in _read(Path("/proc/modules")).splitlines() if line}
    return tuple(name for name in _MODULES if name in loaded)


def limits() -> Limits:
    """The soft ones: what a process gets unless it asks for more."""
    import resource

    def soft(which: int) -> int | None:
        value = resource.getrlimit(which)[0]
        return None if value == resource.RLIM_INFINITY else value

    return Limits(
        soft(resource.RLIMIT_NOFILE), soft(resource.RLIMIT_MEMLOCK), soft(resource.RLIMIT_NPROC)
    )


def memory_bytes() -> int | None:
    """Of the machine."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def memory_limit_bytes() -> int | None:
    """Of this container or job, by cgroup version 2 or 1; None when there is none."""
    for path in ("memory.max", "memory/memory.limit_in_bytes"):
        text = _read(Path("/sys/fs/cgroup") / path)
        if text.isdigit() and int(text) < 2**60:  # version 1 says "none" with a huge number
            return int(text)
    return None


def num_cores() -> int:
    """Those this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
