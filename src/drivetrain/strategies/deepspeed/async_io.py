"""What offload to a disk needs of a machine: DeepSpeed compiles `async_io` at the first start.

Looked for before DeepSpeed begins, whose own failure is some hundred lines of a compiler's.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess

from drivetrain.core.errors import EnvironmentProblem, Problem
from drivetrain.core.requirements import require


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
