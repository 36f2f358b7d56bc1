"""Offload to a disk: what it needs of a machine, and a folder of each process's own."""

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

# What offload to a disk needs of a machine: DeepSpeed compiles `async_io` at the first start.
#
# Looked for before DeepSpeed begins, whose own failure is some hundred lines of a compiler's.


def require_async_io() -> None:
    """Say in one sentence what is missing; nothing is when DeepSpeed was installed with the op."""
    installed = require("deepspeed.git_version_info", extra="deepspeed").installed_ops
    if installed.get("async_io"):
        return
    if problem := _missing():
        raise EnvironmentProblem([problem])


def _missing() -> Problem | None:
    """Of what a C++ extension of torch is compiled with, with the variables that torch reads."""
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    if shutil.which(compiler[0]) is None:
        return _problem(f"a C++ compiler, and {compiler[0]} is not there", "g++")
    if shutil.which("ninja") is None:
        return _problem("ninja, which is not on PATH", "ninja-build")
    # CFLAGS names the folder where libaio was installed by hand
    flags = shlex.split(os.environ.get("CFLAGS", ""))
    looked = subprocess.run(  # noqa: S603
        [*compiler, *flags, "-fsyntax-only", "-x", "c++", "-"],
        input="#include <libaio.h>\n",
        capture_output=True,
        text=True,
        check=False,
    )
    if looked.returncode != 0:
        return _problem("libaio.h, which is not there", "libaio-dev (dnf: libaio-devel)")
    return None


def _problem(what: str, package: str) -> Problem:
    return Problem(
        "parallel.deepspeed",
        f"offload to nvme compiles DeepSpeed's async_io, which needs {what}",
        f"apt-get install {package}, or offload to cpu",
        has_value=False,
    )


# A folder of one process's own on the disk that is offloaded to.
#
# DeepSpeed names its files by rank alone and leaves them behind: two runs on one disk would write
# into each other's weights, and the disk would fill. Who lives holds a lock on a file in its
# folder, and the kernel lets go of it however the process ends.

_PREFIX = "drivetrain-swap-"


def own_folder(disk: Path, owner: object) -> Path:
    """New on `disk`, and gone with `owner`; what ended processes left there is removed first."""
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
    """A folder that is not locked yet must not be taken for one that is left behind."""
    with (disk / f"{_PREFIX}lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _sweep(disk: Path) -> None:
    for folder in disk.glob(f"{_PREFIX}*/"):
        held = os.open(folder / "owner", os.O_CREAT | os.O_RDWR)
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(held)  # its owner lives
        else:
            _remove(folder, held)


def _remove(folder: Path, held: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(held)
