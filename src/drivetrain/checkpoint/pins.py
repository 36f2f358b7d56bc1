"""Pins: a checkpoint that another run is to begin with stays until that one has its own.

A pin is a file beside the checkpoint, named after both, so that whoever can list the folder knows
of it. It is set while the run rests; a run that is writing may be deleting the checkpoint already.
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
    """Keep a checkpoint for `holder`; DamagedCheckpoint when it is not there any more."""
    facts = {"holder": holder, "host": socket.gethostname(), "time_s": time.time()}
    storage.create(_name(folder, holder), json.dumps(facts).encode())
    if storage.size(f"{folder}/{NAME}") is None:
        release(storage, folder, holder)
        raise DamagedCheckpoint("it was deleted")


def release(storage: Storage, folder: str, holder: str) -> None:
    """Let it go the way of others; nothing happens when it is not pinned."""
    storage.remove(_name(folder, holder))


def pinned(storage: Storage) -> dict[str, list[str]]:
    """Folders that must stay, and for whom."""
    found: dict[str, list[str]] = {}
    for name in storage.names():
        if match := _PIN.fullmatch(name):
            found.setdefault(match[1], []).append(match[2])
    return found


def _name(folder: str, holder: str) -> str:
    return f"pin-{folder}-by-{holder}.json"
