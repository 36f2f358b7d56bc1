"""What a rank can tell about itself when its supervisor asks, even while its main thread is stuck.

Stacks come from faulthandler, on a signal: that needs nothing of Python. The collectives it has
called, from torch's flight recorder, are told by a thread that sleeps on a named pipe: a rank that
waits in a collective does not hold Python's lock. Nothing but the standard library is loaded here.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import pickle
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from drivetrain.core.files import write_whole

STACKS = "DRIVETRAIN_STACKS"
ASK = "DRIVETRAIN_ASK"
COLLECTIVES = "DRIVETRAIN_COLLECTIVES"
STACKS_SIGNAL = signal.SIGUSR2
_LATEST = 256
"""Collectives that are told; a step of ddp has a few, of fsdp some per layer."""
_FRAMES = 12
_places: dict[str, Path] = {}
"""Where this process leaves its collectives; empty when nobody asks for them."""


def stay_ready() -> None:
    """From now on this process answers."""
    stacks, ask = os.environ.pop(STACKS, None), os.environ.pop(ASK, None)
    collectives = os.environ.pop(COLLECTIVES, None)
    if stacks is not None:
        # data workers that are forked write to it too: each line goes to the end
        file = open(stacks, "a")  # noqa: SIM115 - stays open as long as the process
        faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True)
        if not faulthandler.is_enabled():  # the last word of one that a library aborts
            faulthandler.enable(file=file, all_threads=True)
    if ask is not None and collectives is not None:
        _places[COLLECTIVES] = Path(collectives)
        threading.Thread(target=_listen, args=(ask,), name="answer", daemon=True).start()


def tell_collectives() -> None:
    """Leave them where the supervisor looks; never a reason to fail."""
    place = _places.get(COLLECTIVES)
    if place is not None:
        with contextlib.suppress(Exception):
            told = _collectives()
            if told is not None or not place.exists():  # a failed rank has told, and left its group
                write_whole(place, json.dumps(told))


def _listen(path: str) -> None:
    while True:
        try:
            with open(path, "rb", buffering=0) as pipe:  # waits here until somebody asks
                asked = pipe.read(1)
        except OSError:
            return  # the session is gone
        if asked:
            tell_collectives()


def _collectives() -> dict[str, Any] | None:
    """The latest, oldest first; None when this process has called none."""
    if "torch.distributed" not in sys.modules:
        return None
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return None
    from torch._C import _distributed_c10d

    trace = pickle.loads(_distributed_c10d._dump_fr_trace())  # type: ignore[attr-defined] # noqa: S301, SLF001 - our own process made it
    groups = {
        _group(group.group_name, group.group_desc): dist.get_process_group_ranks(group)
        for group in list(dist.distributed_c10d._world.pg_names)  # noqa: SLF001 - there is no list
    }
    entries = [entry for entry in trace.get("entries", []) if not entry.get("is_p2p")]
    sites: dict[tuple[Any, ...], int] = {}
    calls = [_call(entry, sites) for entry in entries[-_LATEST:]]
    return {"groups": groups, "sites": list(sites), "calls": calls}


def _call(entry: dict[str, Any], sites: dict[tuple[Any, ...], int]) -> dict[str, Any]:
    """One collective; the lines it was called from are told once for all that come from there."""
    frames = [(f["filename"], f["line"], f["name"]) for f in entry.get("frames", [])]
    own = tuple(frame for frame in frames if _may_be_users(frame[0]))[:_FRAMES]
    return {
        "group": _group(*entry["process_group"]),
        "number": entry["collective_seq_id"],
        "op": entry["profiling_name"].rpartition(":")[2],
        "sizes": entry["input_sizes"],
        "is_done": entry["state"] == "completed" or bool(entry.get("retired")),
        "site": sites.setdefault(own, len(sites)),
    }


def _may_be_users(file: str) -> bool:
    return ("-packages" not in file or "/drivetrain/" in file) and not file.startswith("<")


def _group(name: str, description: str) -> str:
    words = description if description and description != "undefined" else "group"
    return f"{words} ({name})"
