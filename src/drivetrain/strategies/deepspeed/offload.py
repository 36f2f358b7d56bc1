"""Offload to a disk: what the machine must have, and a directory for each process."""

from __future__ import annotations

import fcntl
import os
import shlex
import shutil
import subprocess
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from drivetrain.core.errors import EnvironmentProblem, Problem
from drivetrain.core.requirements import require

# What the machine must have for offload to a disk: DeepSpeed compiles `async_io` at first use.
#
# This is checked before DeepSpeed starts, whose own error is a hundred lines of compiler output.


def require_async_io() -> None:
    """Raise EnvironmentProblem if `async_io` is not installed and cannot be compiled."""
    installed = require("deepspeed.git_version_info", extra="deepspeed").installed_ops
    if installed.get("async_io"):
        return
    if problem := _missing():
        raise EnvironmentProblem([problem])


def _missing() -> Problem | None:
    """Return what is missing to compile a C++ extension, with the variables that torch reads."""
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    if shutil.which(compiler[0]) is None:
        return _problem(f"a C++ compiler, and {compiler[0]} was not found", "g++")
    if shutil.which("ninja") is None:
        return _problem("ninja, which is not on PATH", "ninja-build")
    # CFLAGS may name the directory of a manually installed libaio
    flags = shlex.split(os.environ.get("CFLAGS", ""))
    looked = subprocess.run(  # noqa: S603
        [*compiler, *flags, "-fsyntax-only", "-x", "c++", "-"],
        input="#include <libaio.h>\n",
        capture_output=True,
        text=True,
        check=False,
    )
    if looked.returncode != 0:
        return _problem("libaio.h, which was not found", "libaio-dev (dnf: libaio-devel)")
    return None


def _problem(what: str, package: str) -> Problem:
    return Problem(
        "parallel.deepspeed",
        f"offload to nvme compiles DeepSpeed's async_io, which needs {what}",
        f"apt-get install {package}, or offload to cpu",
        has_value=False,
    )


# A separate directory for each process on the disk that is used for offload.
#
# DeepSpeed names its files by rank only and does not delete them: two runs on one disk would
# overwrite each other's weights, and the disk would fill. Each live process holds a lock on a file
# in its directory, which the kernel releases however the process ends.

_PREFIX = "drivetrain-swap-"


def own_folder(disk: Path, owner: object) -> Path:
    """Create a directory on `disk`, deleted with `owner`; first remove those of dead processes."""
    disk.mkdir(parents=True, exist_ok=True)
    with _alone(disk):
        _sweep(disk)
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=disk))
        held = os.open(folder / "owner", os.O_CREAT | os.O_RDWR)
        fcntl.flock(held, fcntl.LOCK_EX)
    weakref.finalize(owner, _remove, folder, held)
    return folder


@contextmanager
def _alone(disk: Path) -> Iterator[None]:
    """Hold a lock on `disk`, so that a new, not yet locked directory is not seen as abandoned."""
    with (disk / f"{_PREFIX}lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _sweep(disk: Path) -> None:
    for folder in disk.glob(f"{_PREFIX}*/"):
        held = os.open(folder / "owner", os.O_CREAT | os.O_RDWR)
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(held)  # its owner is alive
        else:
            _remove(folder, held)


def _remove(folder: Path, held: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(held)
