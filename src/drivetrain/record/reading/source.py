"""The bytes of a run's directory, from a path or from any fsspec address. Read-only."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Protocol

from drivetrain.core.bounded import LARGE_BYTES, read_bytes
from drivetrain.core.errors import DamagedRun


class Source(Protocol):
    """Names are relative, with slashes; what is not there is empty."""

    address: str

    def names(self, folder: str) -> list[str]:
        """What lies directly in a folder, in order."""
        ...

    def read(
        self, name: str, start: int = 0, length: int | None = None, most: int = LARGE_BYTES
    ) -> bytes:
        """A file, or a part of it; past its end there is nothing. DamagedRun beyond `most`."""
        ...

    def size(self, name: str) -> int:
        """In bytes; 0 when there is no such file."""
        ...


def source_at(address: str | os.PathLike[str]) -> Source:
    """The run's directory at an address."""
    text = os.fspath(address)
    if "://" not in text or text.startswith("file://"):
        return LocalSource(Path(text.removeprefix("file://")))
    return RemoteSource(text)


class LocalSource:
    """A folder of this machine, or one that is mounted."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.address = str(path)

    def names(self, folder: str) -> list[str]:
        """What lies directly in a folder, in order."""
        try:
            return sorted(os.listdir(self.path / folder))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def read(
        self, name: str, start: int = 0, length: int | None = None, most: int = LARGE_BYTES
    ) -> bytes:
        """A file, or a part of it."""
        try:
            # by plain text: thousands of small files are opened one after the other
            return read_bytes(f"{self.path}/{name}", start, length, most)
        except (FileNotFoundError, NotADirectoryError):
            return b""

    def size(self, name: str) -> int:
        """In bytes."""
        try:
            return os.stat(self.path / name).st_size
        except (FileNotFoundError, NotADirectoryError):
            return 0


class RemoteSource:
    """An object store, or whatever else fsspec understands."""

    def __init__(self, address: str) -> None:
        import fsspec

        self.address = address.rstrip("/")
        self._files: Any
        self._files, self._root = fsspec.core.url_to_fs(self.address)

    def names(self, folder: str) -> list[str]:
        """What lies directly in a folder, in order."""
        self._files.invalidate_cache()
        try:
            found = self._files.ls(f"{self._root}/{folder}".rstrip("/"), detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(str(path).rstrip("/").rpartition("/")[2] for path in found)

    def read(
        self, name: str, start: int = 0, length: int | None = None, most: int = LARGE_BYTES
    ) -> bytes:
        """A file, or a part of it."""
        if start and start >= self.size(name):
            return b""  # stores answer a range past the end with an error
        if length is None and self.size(name) - start > most:
            raise DamagedRun(f"{self.address}/{name}: too large; it is not what Drivetrain wrote")
        end = None if length is None else start + length
        try:
            data: bytes = self._files.cat_file(f"{self._root}/{name}", start=start, end=end)
        except (FileNotFoundError, NotADirectoryError):
            return b""
        return data

    def size(self, name: str) -> int:
        """In bytes."""
        self._files.invalidate_cache()
        try:
            return int(self._files.size(f"{self._root}/{name}") or 0)
        except (FileNotFoundError, NotADirectoryError):
            return 0
