"""What may be missing where we run: optional libraries, and Linux. Refused with what to do."""

from __future__ import annotations

import importlib
import os
import platform
from pathlib import Path
from types import ModuleType

from drivetrain.core.errors import EnvironmentProblem, Problem

# Optional libraries, imported where they are used; a missing one names the extra to install.


def require(module: str, *, extra: str) -> ModuleType:
    """Import `module`, or say which extra of Drivetrain brings it."""
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


# What stands on calls that only Linux has is refused elsewhere, with what can be done instead.
#
# Planning, reading runs, submitting jobs and training in one process need none of them.


def require_linux(what: str, remedy: str) -> None:
    """Refuse `what` where processes cannot be watched as a supervisor must."""
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
