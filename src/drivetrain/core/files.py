"""Small files that are read while they are written: whole, or not at all."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def beside(path: Path) -> Iterator[Path]:
    """A name of one's own in the same folder, to be renamed or linked; gone when it was not."""
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        yield partial
    finally:
        partial.unlink(missing_ok=True)


def write_whole(
    path: Path, data: str | bytes, mode: int | None = None, *, sync: bool = False
) -> None:
    """Write beside the file and rename over it; folders are made as needed.

    With a mode, whatever the umask, the file has it before it has its content. `sync`: it is on
    disk, not only in the system's cache, when the call returns.
    """
    if sync:
        make_folder(path.parent)
    path.parent.mkdir(parents=True, exist_ok=True)
    with beside(path) as partial:
        if mode is not None:
            partial.touch(mode & 0o600)
            partial.chmod(mode)
        partial.write_bytes(data.encode() if isinstance(data, str) else data)
        if sync:
            sync_path(partial)
        partial.replace(path)
    if sync:
        sync_path(path.parent)


def make_folder(path: Path) -> None:
    """With those above it; each is safe once the folder that holds its name is on disk."""
    if path.is_dir():
        return
    make_folder(path.parent)
    path.mkdir(exist_ok=True)
    sync_path(path.parent)


def sync_path(path: Path) -> None:
    """A file's contents, or a folder's names, onto the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
