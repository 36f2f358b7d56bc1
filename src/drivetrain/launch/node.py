"""One node's supervisor as a separate process: `python -m drivetrain.launch.node ARGS…`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from drivetrain.core.errors import ConfigError, DrivetrainError
from drivetrain.core.imports import without_collector
from drivetrain.launch.early import start_early
from drivetrain.supervise.processes.node import WarmProcess, adopt_orphans
from drivetrain.supervise.processes.worker import die_with_parent


def run(argv: Sequence[str]) -> None:
    """Supervise; a DrivetrainError is printed without a traceback, and sets the exit code."""
    die_with_parent()
    # each of them imports torch, which takes seconds: in parallel
    adopt_orphans()
    head_start = start_early(argv)
    warm = WarmProcess() if "--warm-start" in argv else None
    with without_collector():
        from drivetrain.launch.local import launch

    try:
        sys.exit(launch(argv, warm, head_start))
    except DrivetrainError as error:
        prefix = "" if isinstance(error, ConfigError) else "error: "
        sys.stderr.write(f"{prefix}{error}\n")
        sys.exit(error.exit_code)


if __name__ == "__main__":
    run(sys.argv[1:])
