"""What stands on calls that only Linux has is refused elsewhere, with what can be done instead.

Planning, reading runs, submitting jobs and training in one process need none of them.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path

from drivetrain.core.errors import EnvironmentProblem, Problem


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
