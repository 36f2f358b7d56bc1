"""Where the seconds of each step went: one record of 40 bytes per step, one file per rank.

`events/<rank>.steps` is a header of 512 bytes (one line of JSON, filled up with spaces) that names
the fields and their types, and after it the records, appended in the order in which the steps were
taken. A step that was done again after a failure is there twice. 10,000 steps are 400 kB, and a
reader takes them in with one call and no parsing.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from drivetrain.core.bounded import parse_json
from drivetrain.record.run_directory import LATEST_S

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

HEADER_BYTES = 512
FIELDS = (
    ("step", "<u4"),
    ("attempt", "<u2"),
    ("flags", "<u2"),
    ("start_s", "<f8"),
    ("data_wait_s", "<f4"),
    ("compute_s", "<f4"),
    ("communication_s", "<f4"),
    ("optimizer_s", "<f4"),
    ("checkpoint_s", "<f4"),
    ("other_s", "<f4"),
)
SECONDS = tuple(name for name, _ in FIELDS[4:])
"""They follow each other: a step begins at `start_s` and takes the sum of them."""
COMPILES = 1
"""Flag: torch.compile worked in this step."""
HOST_TIMED = 2
"""Flag: timed by the host's clock while a device worked on its own; only whole stretches of steps
are true, not how long one took or what it spent its time on."""
_KINDS = frozenset({"<u1", "<u2", "<u4", "<u8", "<i4", "<i8", "<f4", "<f8"})
_RECORD = struct.Struct("<IHHd6f")


class StepTimes(NamedTuple):
    """One step of one rank. Seconds are this rank's own, by its own clock."""

    step: int
    """Steps done after it: the first is 1."""
    start_s: float
    data_wait_s: float
    """For batches that were not there yet."""
    compute_s: float
    """Forward and backward: all this rank did itself before it had to wait for others."""
    communication_s: float
    """Waiting in collectives, with nothing of its own left to do."""
    optimizer_s: float
    """Clipping, the optimizer, and hooks around it."""
    checkpoint_s: float
    """The step waited for a save."""
    other_s: float
    """Logging, evaluation, hooks, and agreeing with the other ranks."""
    flags: int = 0


class StepWriter:
    """Appends to one rank's file; what a killed process left half-written is cut off."""

    def __init__(self, path: Path, attempt: int, epoch_s: float = 0.0) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._attempt, self._epoch_s = attempt, epoch_s
        self._file = path.open("ab", buffering=0)
        size = os.fstat(self._file.fileno()).st_size
        if size < HEADER_BYTES:
            self._file.truncate(0)
            self._file.write(header())
        else:
            self._file.truncate(size - (size - HEADER_BYTES) % _RECORD.size)

    def write(self, steps: Sequence[StepTimes]) -> None:
        """All of them in one call to the system."""
        attempt, epoch_s = self._attempt, self._epoch_s
        records = [
            _RECORD.pack(number, attempt, flags, epoch_s + start_s, *seconds)
            for number, start_s, *seconds, flags in steps
        ]
        self._file.write(b"".join(records))

    def close(self) -> None:
        self._file.close()


def header() -> bytes:
    """What the file begins with."""
    document = {"format": "drivetrain steps", "version": 1, "fields": FIELDS}
    return json.dumps(document).encode().ljust(HEADER_BYTES - 1) + b"\n"


def parse_steps(data: bytes) -> NDArray[Any]:
    """The records in a file's bytes; a half-written last one is left out. Read-only."""
    import numpy as np

    if len(data) < HEADER_BYTES:
        return np.empty(0, np.dtype(list(FIELDS)))
    return records_in(data, fields_of(data[:HEADER_BYTES]), HEADER_BYTES)


def records_in(data: bytes, dtype: np.dtype[Any], start: int = 0) -> NDArray[Any]:
    """Whole records in a piece of a file."""
    import numpy as np

    num_records = (len(data) - start) // dtype.itemsize
    return np.frombuffer(data, dtype, num_records, start)


def fields_of(first_bytes: bytes) -> np.dtype[Any]:
    """The record's type, as the file itself states it."""
    import numpy as np

    fields = [(str(name), str(kind)) for name, kind in parse_json(first_bytes)["fields"]]
    kinds = dict(fields)
    if not {"step", "start_s"} <= set(kinds):
        raise ValueError("its header lacks fields that every record has")
    if not set(kinds.values()) <= _KINDS:
        raise ValueError("its header has fields of other kinds than numbers")
    return np.dtype(fields)


def checked(table: NDArray[Any]) -> NDArray[Any]:
    """The records, if times are times; ValueError otherwise."""
    import numpy as np

    if not len(table):
        return table
    starts = table["start_s"]
    with np.errstate(all="ignore"):
        is_good = starts.min() >= 0 and starts.max() <= LATEST_S
        is_good = is_good and all(
            np.isfinite(table[name].sum()) for name in SECONDS if name in (table.dtype.names or ())
        )
    if not is_good:
        raise ValueError("a step has no beginning or no duration")
    return table
