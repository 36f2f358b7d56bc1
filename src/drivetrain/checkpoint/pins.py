"""Pins: keep a checkpoint that another run will start from until that run has its own.

A pin is a file beside the checkpoint, named after both, so listing the folder shows it. Pin only
while the run is not writing; a running run may already be deleting the checkpoint.
"""

from __future__ import annotations

import json
import re
import socket
import time

from drivetrain.checkpoint.manifest import NAME, DamagedCheckpoint
from drivetrain.checkpoint.storage import Storage

_PIN = re.compile(r"pin-(step-[0-9]+-a[0-9]+)-by-([A-Za-z0-9._-]+)\.json")


def pin(storage: Storage, folder: str, holder: str) -> None:
    """Pin a checkpoint for `holder`; raise DamagedCheckpoint if it no longer exists."""
    facts = {"holder": holder, "host": socket.gethostname(), "time_s": time.time()}
    storage.create(_name(folder, holder), json.dumps(facts).encode())
    if storage.size(f"{folder}/{NAME}") is None:
        release(storage, folder, holder)
        raise DamagedCheckpoint("it was deleted")


def release(storage: Storage, folder: str, holder: str) -> None:
    """Remove the pin, if there is one."""
    storage.remove(_name(folder, holder))


def pinned(storage: Storage) -> dict[str, list[str]]:
    """Return the pinned folders and their holders."""
    found: dict[str, list[str]] = {}
    for name in storage.names():
        if match := _PIN.fullmatch(name):
            found.setdefault(match[1], []).append(match[2])
    return found


def _name(folder: str, holder: str) -> str:
    return f"pin-{folder}-by-{holder}.json"
