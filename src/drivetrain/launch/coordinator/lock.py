"""The lock of a run's coordinator: whoever can take it knows that none is at work.

The system lets it go when its holder dies, however that comes about, so nobody has to guess from a
process id.
"""

from __future__ import annotations

from pathlib import Path
from typing import IO

from drivetrain.core import locks

_FILE = "conductor.lock"


def hold(run_dir: Path) -> IO[str] | None:
    """Take it, for as long as the file stays open; None while somebody has it."""
    return locks.hold(run_dir / _FILE)


def holder(run_dir: Path) -> tuple[str, int] | None:
    """The host and process id of the coordinator at work; None when there is none."""
    return locks.holder(run_dir / _FILE)
