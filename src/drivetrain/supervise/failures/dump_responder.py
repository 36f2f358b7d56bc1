"""Dumps a rank's stacks and collectives on request, even while its main thread is stuck.

A thread that waits on a named pipe writes the dump: a rank that waits in a collective does not hold
the GIL. A rank that never releases it (stuck in a C extension) is sent a signal instead, and
faulthandler writes its stacks: that does not need the interpreter, but it is not safe while a
thread runs Python code, whose frames change while they are read (a segmentation fault in CPython
3.11). This module loads only the standard library.
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from drivetrain.core.files import write_whole

# The latest collectives of this process, from torch's flight recorders.
#
# There are two: NCCL's own, and one that the other backends share. Their entries have the same form
# (torch/csrc/distributed/c10d/FlightRecorder.hpp), but each backend numbers its calls separately:
# in a group with one backend for the CPU and one for the device, call 7 of gloo and call 7 of NCCL
# are unrelated, so each backend of such a group is reported as a separate group.

_SHARED, _NCCLS = "_dump_fr_trace", "_dump_nccl_trace"
_LATEST = 256
"""Collectives reported per recorder; a ddp step has a few, an fsdp step several per layer."""
_FRAMES = 12

_Entry = Mapping[str, Any]


@dataclass(frozen=True)
class RecordedGroup:
    """A process group of this process."""

    name: str
    description: str
    ranks: Sequence[int]
    backends: tuple[str, ...]

    def label(self, backend: str) -> str:
        """The name under which its calls on one backend are reported; the same on every rank."""
        known = self.description not in ("", "undefined")
        words = f"{self.description if known else 'group'} ({self.name})"
        return words if self.backends == (backend,) else f"{words}, {backend}"


def latest_collectives() -> dict[str, Any] | None:
    """Return the latest collectives, oldest first; None if there is no process group."""
    if "torch.distributed" not in sys.modules:
        return None
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return None
    return describe(_read(), _groups())


def describe(traces: Mapping[str, _Entry], groups: Sequence[RecordedGroup]) -> dict[str, Any]:
    """Merge the entries of both recorders into one sequence of calls. Pure."""
    by_name = {group.name: group for group in groups}
    labels = {group.label(backend): group for group in groups for backend in group.backends}
    sites: dict[tuple[Any, ...], int] = {}
    entries = [
        (entry["time_created_ns"], recorder, entry)
        for recorder, trace in traces.items()
        for entry in _collectives(trace)
    ]
    calls = []
    for _, recorder, entry in sorted(entries, key=lambda each: each[0]):
        name, description = entry["process_group"]
        backend, _, op = entry["profiling_name"].rpartition(":")
        group = by_name.get(name, RecordedGroup(name, description, (), (backend,)))
        label = group.label(backend)
        labels.setdefault(label, group)
        calls.append(
            {
                "group": label,
                "number": entry["collective_seq_id"],
                "op": op,
                "sizes": entry["input_sizes"],
                "is_done": _is_done(entry, recorder),
                "site": sites.setdefault(_own_frames(entry), len(sites)),
            }
        )
    ranks = {label: list(group.ranks) for label, group in labels.items()}
    return {"groups": ranks, "sites": list(sites), "calls": calls}


def _read() -> dict[str, _Entry]:
    """Dump each recorder that this build of torch has."""
    from torch._C import _distributed_c10d

    dumps = {name: getattr(_distributed_c10d, name, None) for name in (_SHARED, _NCCLS)}
    return {
        name: pickle.loads(dump())  # noqa: S301 - our own process made it
        for name, dump in dumps.items()
        if dump is not None
    }


def _groups() -> list[RecordedGroup]:
    import torch.distributed as dist

    return [
        RecordedGroup(
            group.group_name,
            group.group_desc,
            dist.get_process_group_ranks(group),
            _backends(dist.get_backend_config(group)),
        )
        for group in list(dist.distributed_c10d._world.pg_names)  # noqa: SLF001 - there is no list
    ]


def _backends(config: str) -> tuple[str, ...]:
    """`cpu:gloo,cuda:nccl` → gloo, nccl; a backend for all devices is listed once."""
    return tuple(dict.fromkeys(pair.rpartition(":")[2] for pair in config.split(",")))


def _collectives(trace: _Entry) -> list[_Entry]:
    entries = [entry for entry in trace.get("entries", ()) if not entry.get("is_p2p")]
    return entries[-_LATEST:]


def _is_done(entry: _Entry, recorder: str) -> bool:
    """True if the call has completed.

    NCCL updates an entry's state from the device, and also retires one that has timed out. The
    other backends do not update the state and only retire an entry.
    """
    is_retired = bool(entry.get("retired")) and recorder != _NCCLS
    return entry["state"] == "completed" or is_retired


def _own_frames(entry: _Entry) -> tuple[Any, ...]:
    """Return the frames of the call that may be the user's."""
    frames = [(f["filename"], f["line"], f["name"]) for f in entry.get("frames", ())]
    return tuple(frame for frame in frames if _may_be_users(frame[0]))[:_FRAMES]


def _may_be_users(file: str) -> bool:
    return ("-packages" not in file or "/drivetrain/" in file) and not file.startswith("<")


STACKS = "DRIVETRAIN_STACKS"
ASK = "DRIVETRAIN_ASK"
COLLECTIVES = "DRIVETRAIN_COLLECTIVES"
STACKS_SIGNAL = signal.SIGUSR2
_places: dict[str, Path] = {}
"""Where this process writes its dumps; empty if there is no supervisor."""


def stay_ready() -> None:
    """Answer dump requests from now on."""
    stacks, ask = os.environ.pop(STACKS, None), os.environ.pop(ASK, None)
    collectives = os.environ.pop(COLLECTIVES, None)
    if stacks is None or ask is None or collectives is None:
        return
    # append mode, because forked data workers write to it too
    file = open(stacks, "a")  # noqa: SIM115 - stays open as long as the process
    faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True)
    if not faulthandler.is_enabled():  # for a process that a library aborts
        faulthandler.enable(file=file, all_threads=True)
    _places[COLLECTIVES] = Path(collectives)
    threading.Thread(target=_listen, args=(ask, file), name="answer", daemon=True).start()


def tell_collectives() -> None:
    """Write the collectives to the file that the supervisor reads; ignore errors."""
    place = _places.get(COLLECTIVES)
    if place is not None:
        with contextlib.suppress(Exception):
            told = latest_collectives()
            if told is not None or not place.exists():  # written before it left its group
                write_whole(place, json.dumps(told))


def _listen(path: str, stacks: TextIO) -> None:
    while True:
        try:
            with open(path, "rb", buffering=0) as pipe:  # blocks until there is a request
                asked = pipe.read(1)
        except OSError:
            return  # the session is gone
        if asked:
            faulthandler.dump_traceback(stacks, all_threads=True)  # holds the GIL throughout
            tell_collectives()
