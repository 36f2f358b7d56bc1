"""Atomic writes of small files: a concurrent reader sees a whole file or none."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def beside(path: Path) -> Iterator[Path]:
    """Yield a unique temporary path in the same directory; removed if it is left at the end."""
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        yield partial
    finally:
        partial.unlink(missing_ok=True)


def write_whole(
    path: Path, data: str | bytes, mode: int | None = None, *, sync: bool = False
) -> None:
    """Write a temporary file and rename it over the target; create directories as needed.

    With a mode, the file has it before it has its content, whatever the umask. With `sync`, the
    file is on disk, not only in the system's cache, when the call returns.
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
    """Create a directory and its parents, and sync each parent, which holds the new name."""
    if path.is_dir():
        return
    make_folder(path.parent)
    path.mkdir(exist_ok=True)
    sync_path(path.parent)


def sync_path(path: Path) -> None:
    """Flush a file's contents, or a directory's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
