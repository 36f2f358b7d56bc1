"""Storage: a folder, on this machine's file system or at any fsspec address.

    storage = storage_at("runs/gpt/checkpoints")      # or "s3://bucket/gpt"
    storage.put("a/manifest.json", data)              # atomic
    storage.create("attempt-00002.json", data)        # False if it exists already

On a file system, written data is on disk, not only in the page cache, when a call returns; an
object store guarantees that itself.
"""

from __future__ import annotations

import errno
import inspect
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

from drivetrain.core.bounded import LARGE_BYTES, read_bytes
from drivetrain.core.errors import ConfigError, DamagedRun, EnvironmentProblem, Problem
from drivetrain.core.files import beside, make_folder, sync_path
from drivetrain.core.requirements import install_command

_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


class Storage(Protocol):
    """The operations on a folder that checkpoints need. Names are relative, with slashes."""

    address: str

    def names(self, folder: str = "") -> list[str]:
        """Return the names directly in a folder; empty if the folder does not exist."""
        ...

    def size(self, name: str) -> int | None:
        """Return the size in bytes; None if there is no such file."""
        ...

    def read(
        self, name: str, start: int = 0, length: int | None = None, most: int = LARGE_BYTES
    ) -> bytes:
        """Read a file or part of it; raise DamagedRun if that is more than `most` bytes."""
        ...

    def writing(self, name: str) -> Any:
        """Return a context with a binary stream; the file is durable when the context exits."""
        ...

    def put(self, name: str, data: bytes) -> None:
        """Write a file atomically: a reader sees all of it or none."""
        ...

    def create(self, name: str, data: bytes) -> bool:
        """Write a file unless it exists; return whether it was written."""
        ...

    def remove(self, name: str) -> None:
        """Delete a file or a folder; do nothing if it does not exist."""
        ...


def storage_at(address: str | Path) -> Storage:
    """Return the storage at an address: a path, or an fsspec address."""
    text = str(address)
    if "://" not in text or text.startswith("file://"):
        return LocalStorage(Path(text.removeprefix("file://")))
    return RemoteStorage(text)


class LocalStorage:
    """A folder on this machine or on a shared file system."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.address = str(self.path)

    def names(self, folder: str = "") -> list[str]:
        try:
            return sorted(os.listdir(self.path / folder))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def size(self, name: str) -> int | None:
        path = self.path / name
        return path.stat().st_size if path.is_file() else None

    def read(
        self, name: str, start: int = 0, length: int | None = None, most: int = LARGE_BYTES
    ) -> bytes:
        """Read a file or part of it; regular files only."""
        return read_bytes(self.path / name, start, length, most)

    @contextmanager
    def writing(self, name: str) -> Iterator[BinaryIO]:
        """Yield a stream whose bytes are on disk when the context exits."""
        path = self.path / name
        make_folder(path.parent)
        with open(path, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())

    def put(self, name: str, data: bytes) -> None:
        """Write a temporary file next to it, then rename that over the file."""
        path = self.path / name
        with self._finished(path, data) as partial:
            partial.replace(path)
        sync_path(path.parent)

    def create(self, name: str, data: bytes) -> bool:
        """Link it from a complete file, so that no reader sees half of it."""
        path = self.path / name
        with self._finished(path, data) as partial:
            try:
                os.link(partial, path)
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                return self._create_without_links(path, data)
        sync_path(path.parent)
        return True

    def _create_without_links(self, path: Path, data: bytes) -> bool:
        """Create it exclusively; a mounted object store may let two processes succeed."""
        try:
            with path.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except FileExistsError:
            return False
        warnings.warn(
            f"{self.address} does not support hard links: if it is a mounted object store, two "
            f"launchers could both create {path.name}; start them one at a time",
            stacklevel=2,
        )
        sync_path(path.parent)
        return True

    @contextmanager
    def _finished(self, path: Path, data: bytes) -> Iterator[Path]:
        """Yield a temporary file next to `path`, complete and on disk."""
        with beside(path) as partial:
            with self.writing(str(partial.relative_to(self.path))) as file:
                file.write(data)
            yield partial

    def remove(self, name: str) -> None:
        path = self.path / name
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif path.exists():
            path.unlink(missing_ok=True)
            sync_path(path.parent)  # a later deletion must not reach the disk before this one


class RemoteStorage:
    """An object store, or any other fsspec file system, where a put is already atomic."""

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")
        self._fs, root = _open_store(self.address)
        self._root = root.rstrip("/")

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def names(self, folder: str = "") -> list[str]:
        self._fs.invalidate_cache()
        try:
            found = self._fs.ls(self._at(folder), detail=False)
        except FileNotFoundError:
            return []
        own = self._at(folder).rstrip("/")
        names = (str(path).rstrip("/") for path in found)
        return sorted(path.rpartition("/")[2] for path in names if path != own)

    def size(self, name: str) -> int | None:
        self._fs.invalidate_cache()
        try:
            size = self._fs.info(self._at(name))["size"]
        except FileNotFoundError:
            return None
        return int(size)

    def read(
        self, name: str, start: int = 0, length: int | None = None, most: int = LARGE_BYTES
    ) -> bytes:
        """Read a file or part of it; one request for a part, two for a whole file."""
        if length == 0:
            return b""  # stores reject an empty range
        if length is None and (self.size(name) or 0) - start > most:
            raise DamagedRun(
                f"{self.address}/{name}: too large; Drivetrain did not write this file"
            )
        end = None if length is None else start + length
        return bytes(self._fs.cat_file(self._at(name), start=start, end=end))

    @contextmanager
    def writing(self, name: str) -> Iterator[BinaryIO]:
        """Yield a stream that becomes an object if the context exits without an error."""
        stream = self._fs.open(self._at(name), "wb")
        try:
            yield cast(BinaryIO, stream)
        except BaseException:
            stream.discard()
            raise
        stream.close()

    def put(self, name: str, data: bytes) -> None:
        self._fs.pipe_file(self._at(name), data)

    def create(self, name: str, data: bytes) -> bool:
        """Use the store's conditional write (If-None-Match) where it has one."""
        if self.size(name) is not None:
            return False
        if not _knows_conditions(self._fs):
            self.put(name, data)
            self._warn_of_two(name)
            return True
        try:
            self._put_new(name, data)
        except FileExistsError:
            return False
        try:
            self._put_new(name, data)  # the same bytes: a store that honours the condition refuses
        except FileExistsError:
            return True
        self._warn_of_two(name)
        return True

    def _put_new(self, name: str, data: bytes) -> None:
        self._fs.pipe_file(self._at(name), data, mode="create")

    def _warn_of_two(self, name: str) -> None:
        warnings.warn(
            f"{self.address}: this store cannot create {name} only if it does not exist, so two "
            "launchers that start at the same moment could claim the same attempt; start one at a "
            "time, or use a store with conditional writes (pip install -U fsspec and the store's "
            "library)",
            stacklevel=3,
        )

    def remove(self, name: str) -> None:
        """Delete a file or everything under a prefix."""
        try:
            self._fs.rm(self._at(name), recursive=True)
        except FileNotFoundError:
            return


def _knows_conditions(fs: Any) -> bool:
    """True if the library supports creating a file only if it does not exist."""
    from fsspec.spec import AbstractFileSystem

    kind = type(fs)
    method = kind._pipe_file if hasattr(kind, "_pipe_file") else kind.pipe_file  # noqa: SLF001
    # fsspec's default checks first and then writes, so two processes can both succeed
    is_own = method is not AbstractFileSystem.pipe_file
    return is_own and "mode" in inspect.signature(method).parameters


def _open_store(address: str) -> tuple[Any, str]:
    import fsspec

    try:
        store: tuple[Any, str] = fsspec.core.url_to_fs(address)
    except ImportError as error:
        is_s3 = address.startswith(("s3://", "s3a://"))
        remedy = install_command("s3") if is_s3 else "install the package it names"
        raise EnvironmentProblem([Problem("address", str(error), remedy, address)]) from error
    except ValueError as error:
        remedy = "give a path, or an address fsspec knows (s3://…, gs://…)"
        raise ConfigError([Problem("address", str(error), remedy, address)]) from error
    return store
