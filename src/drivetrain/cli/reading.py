"""Reading a run that may be damaged: an unexpected error becomes a one-line DamagedRun."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from drivetrain.core.errors import DamagedRun, DrivetrainError


@contextmanager
def reading(*addresses: str) -> Iterator[None]:
    """Turn any unexpected exception inside into DamagedRun, with the place where it was raised.

    Files of a run are checked as they are read; this covers what those checks miss.
    """
    try:
        yield
    except (DrivetrainError, BrokenPipeError):
        raise
    except Exception as error:
        from drivetrain.core.bounded import one_line  # YAML's parser would slow every --help

        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}:{last.lineno}"
        said = f"{type(error).__name__} at {where}: {one_line(error)[:200]}"
        runs = " and ".join(addresses)
        raise DamagedRun(f"{runs}: cannot be read as a run ({said})") from error
