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


def write_whole(path: Path, data: str | bytes, *, mode: int = 0o666) -> None:
    """Write beside the file and rename over it; folders are made as needed.

    The file has its mode (less the umask) before it has its content.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with beside(path) as partial:
        with open(partial, "wb", opener=lambda at, flags: os.open(at, flags, mode)) as file:
            file.write(data.encode() if isinstance(data, str) else data)
        partial.replace(path)
