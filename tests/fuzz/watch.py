"""What a reader must not do meanwhile: write anywhere, take long, or take much memory."""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

MOST_S = 5.0
MOST_BYTES = 500 << 20
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGES = {
    "os.remove",
    "os.rename",
    "os.mkdir",
    "os.rmdir",
    "os.symlink",
    "os.link",
    "os.truncate",
}
_CHANGES |= {"os.chmod", "os.chown", "os.system", "os.exec", "os.kill", "subprocess.Popen"}
_seen: list[str] | None = None


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if _seen is None:
        return
    if event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITES:
        _seen.append(f"opened {arguments[0]} to write")
    elif event in _CHANGES:
        _seen.append(f"{event}{arguments}")


sys.addaudithook(_note)


@contextmanager
def harmless() -> Iterator[None]:
    """Asserts that what runs inside only reads, soon ends and stays small."""
    global _seen  # noqa: PLW0603 - an audit hook stays for good, and needs somewhere to look
    began_s, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    _seen = []
    try:
        yield
    finally:
        seen, _seen = _seen, None
    assert seen == []
    assert time.monotonic() - began_s < MOST_S
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MOST_BYTES
