"""Checks for optional libraries and for Linux; errors say what to install or do instead."""

from __future__ import annotations

import importlib
import os
import platform
from pathlib import Path
from types import ModuleType

from drivetrain.core.errors import EnvironmentProblem, Problem

# Optional libraries are imported where they are used; the error names the extra to install.


def require(module: str, *, extra: str) -> ModuleType:
    """Import `module`; EnvironmentProblem names the extra of Drivetrain that installs it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise EnvironmentProblem(
            [
                Problem(
                    where=module,
                    rule="this optional library is not installed",
                    remedy=f"pip install 'drivetrain[{extra}]'",
                    has_value=False,
                )
            ]
        ) from error


# Code that needs Linux system calls is refused elsewhere, with a remedy.
#
# Planning, reading runs, submitting jobs and training in one process do not need Linux.


def require_linux(what: str, remedy: str) -> None:
    """Refuse `what` on systems without the calls that a supervisor needs to watch processes."""
    missing = [
        name
        for name, is_there in (
            ("pidfd_open", hasattr(os, "pidfd_open")),
            ("/proc", Path("/proc/self/stat").exists()),
        )
        if not is_there
    ]
    if missing:
        rule = f"needs Linux; this {platform.system()} has no {' and no '.join(missing)}"
        raise EnvironmentProblem([Problem(what, rule, remedy, has_value=False)])
