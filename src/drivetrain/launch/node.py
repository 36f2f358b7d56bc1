"""One node's supervisor as a process of its own: `python -m drivetrain.launch.node WORDS…`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from drivetrain.core.errors import ConfigError, DrivetrainError
from drivetrain.core.imports import without_collector
from drivetrain.launch.early import start_early
from drivetrain.supervise.processes.node import WarmProcess, adopt_orphans
from drivetrain.supervise.processes.worker import die_with_parent


def run(argv: Sequence[str]) -> None:
    """Supervise; errors on purpose are shown as they are, with their exit code."""
    die_with_parent()
    # all of them import torch, which takes seconds: side by side
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
