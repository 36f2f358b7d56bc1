"""Moments at which a rank writes to a folder: counted, recorded, and one of them its last.

The rank ends itself with SIGKILL just before a file is opened, renamed or synced, just after it was
created, or when half of it is written: moments that an outside `kill -9` would hit only by luck.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class FileMoments:
    """The moments of one rank, below one folder."""

    def __init__(self, folder: Path, last: int | None = None) -> None:
        self.names: list[str] = []
        self.written: list[str] = []
        self.steps: list[tuple[str, str, str]] = []
        """("sync", path, "") and ("rename", from, to), in order."""
        self._folder = str(folder)
        self._last = last
        self._is_on = False

    def install(self) -> None:
        """Count from now on, until `stop`."""
        self._is_on = True
        sys.addaudithook(self._audited)
        setattr(os, "fsync", self._syncing(os.fsync))  # noqa: B010 - mypy allows no assignment
        setattr(torch, "save", self._saving(torch.save))  # noqa: B010

    def stop(self) -> None:
        self.moment("save() has returned")
        self._is_on = False

    def moment(self, name: str, before_the_end: Callable[[], object] | None = None) -> None:
        """A moment at which the rank may be killed."""
        if not self._is_on:
            return
        if self._last == len(self.names):
            self._is_on = False
            if before_the_end is not None:
                before_the_end()
            os.kill(os.getpid(), signal.SIGKILL)
        self.names.append(name)

    def _audited(self, event: str, args: tuple[Any, ...]) -> None:
        if not self._is_on or event not in ("open", "os.rename", "os.mkdir", "os.remove"):
            return
        if not isinstance(args[0], str | os.PathLike):
            return
        path = os.path.abspath(os.fspath(args[0]))
        if not path.startswith(self._folder):
            return
        name = os.path.relpath(path, self._folder)
        if event == "open":
            if args[2] & _WRITES:
                self.moment(f"before {name} is opened")
                self.moment(f"{name} is created, and empty", lambda: Path(path).write_bytes(b""))
                self.written.append(path)
        elif event == "os.rename":
            target = os.path.abspath(os.fspath(args[1]))
            self.moment(f"before {name} is renamed")
            self.steps.append(("rename", path, target))
        else:
            verb = "made" if event == "os.mkdir" else "removed"
            self.moment(f"before {name} is {verb}")

    def _syncing(self, original: Callable[[Any], None]) -> Callable[[Any], None]:
        def fsync(file: Any) -> None:
            number = file if isinstance(file, int) else file.fileno()
            path = os.readlink(f"/proc/self/fd/{number}")
            self.moment(f"before {os.path.relpath(path, self._folder)} is synced")
            original(file)
            self.steps.append(("sync", path, ""))

        return fsync

    def _saving(self, original: Callable[..., None]) -> Callable[..., None]:
        def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
            content = io.BytesIO()
            original(obj, content, *args, **kwargs)
            half = content.getvalue()[: len(content.getvalue()) // 2]
            is_path = isinstance(f, str | os.PathLike)
            name = os.path.basename(os.fspath(f)) if is_path else getattr(f, "name", "")

            def write_half() -> None:
                if is_path:
                    Path(f).write_bytes(half)
                else:
                    f.write(half)
                    f.flush()

            self.moment(f"half of {os.path.basename(str(name))} is written", write_half)
            if is_path:
                self.written.append(os.path.abspath(os.fspath(f)))
            original(obj, f, *args, **kwargs)

        return save
