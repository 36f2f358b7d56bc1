"""Which software is installed, without importing any of it: torch alone would take seconds."""

from __future__ import annotations

import importlib.util
import platform
import re
from importlib import metadata
from pathlib import Path

from drivetrain._version import __version__

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
    """Name → version, of what a run depends on."""
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
