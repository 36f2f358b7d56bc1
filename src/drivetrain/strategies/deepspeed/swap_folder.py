"""A folder of one process's own on the disk that is offloaded to.

DeepSpeed names its files by rank alone and leaves them behind: two runs on one disk would write
into each other's weights, and the disk would fill. Who lives holds a lock on a file in its folder,
and the kernel lets go of it however the process ends.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
