"""What a Mac does not have is taken away before anything is imported. Only the kernel stays."""

from __future__ import annotations

import builtins
import io
import os
import signal
from typing import Any

_CALLS = {
    os: (
        "pidfd_open",
        "sched_getaffinity",
        "sched_setaffinity",
        "pipe2",
        "eventfd",
        "memfd_create",
    ),
    signal: ("sigtimedwait", "sigwaitinfo", "SIGRTMIN", "SIGRTMAX", "SIGPWR"),
}
_LINUX_ONLY = ("/proc", "/sys")

for module, names in _CALLS.items():
    for name in names:
        if hasattr(module, name):
            delattr(module, name)


def _without_linux(call: Any) -> Any:
    def hidden(path: Any = ".", *rest: Any, **named: Any) -> Any:
        if isinstance(path, str | os.PathLike) and os.fspath(path).startswith(_LINUX_ONLY):
            raise FileNotFoundError(2, "not on this system", os.fspath(path))
        return call(path, *rest, **named)

    return hidden


for holder, name in ((os, "stat"), (os, "listdir"), (os, "scandir"), (os, "open")):
    setattr(holder, name, _without_linux(getattr(holder, name)))
builtins.open = io.open = _without_linux(io.open)
