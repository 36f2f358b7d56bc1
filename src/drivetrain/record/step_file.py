"""Step files: where the seconds of each step went, 40 bytes per step, one file per rank.

`events/<rank>.steps` starts with a header of 512 bytes (one line of JSON, padded with spaces) that
names the fields and their types. The records follow in the order in which the steps were taken. A
step that was repeated after a failure appears twice. 10,000 steps take 400 kB, and a reader loads
them with one call and no parsing.
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
"""Consecutive parts: a step begins at `start_s` and takes the sum of them."""
COMPILES = 1
"""Flag: torch.compile was active in this step."""
HOST_TIMED = 2
"""Flag: timed by the host's clock while a device ran asynchronously. Totals over many steps are
right, but not the time of one step or of its parts."""
_KINDS = frozenset({"<u1", "<u2", "<u4", "<u8", "<i4", "<i8", "<f4", "<f8"})
_RECORD = struct.Struct("<IHHd6f")


class StepTimes(NamedTuple):
    """One step of one rank, timed by the rank's own clock."""

    step: int
    """The step's number; the first is 1."""
    start_s: float
    data_wait_s: float
    """Waiting for batches that were not ready."""
    compute_s: float
    """Forward and backward: the rank's own work before it has to wait for others."""
    communication_s: float
    """Waiting in collectives, without overlapping work."""
    optimizer_s: float
    """Clipping, the optimizer, and hooks around it."""
    checkpoint_s: float
    """Waiting for a checkpoint to be saved."""
    other_s: float
    """Logging, evaluation, hooks, and control messages between ranks."""
    flags: int = 0


class StepWriter:
    """Appends to one rank's file; a half-written record of a killed process is cut off."""

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
        """Write all records with one system call."""
        attempt, epoch_s = self._attempt, self._epoch_s
        records = [
            _RECORD.pack(number, attempt, flags, epoch_s + start_s, *seconds)
            for number, start_s, *seconds, flags in steps
        ]
        self._file.write(b"".join(records))

    def close(self) -> None:
        self._file.close()


def header() -> bytes:
    """Return the file's header."""
    document = {"format": "drivetrain steps", "version": 1, "fields": FIELDS}
    return json.dumps(document).encode().ljust(HEADER_BYTES - 1) + b"\n"


def parse_steps(data: bytes) -> NDArray[Any]:
    """Parse a file's bytes; a half-written last record is left out. The result is read-only."""
    import numpy as np

    if len(data) < HEADER_BYTES:
        return np.empty(0, np.dtype(list(FIELDS)))
    return records_in(data, fields_of(data[:HEADER_BYTES]), HEADER_BYTES)


def records_in(data: bytes, dtype: np.dtype[Any], start: int = 0) -> NDArray[Any]:
    """Return the complete records in a piece of a file."""
    import numpy as np

    num_records = (len(data) - start) // dtype.itemsize
    return np.frombuffer(data, dtype, num_records, start)


def fields_of(first_bytes: bytes) -> np.dtype[Any]:
    """Return the record's type, as stated in the file's header."""
    import numpy as np

    fields = [(str(name), str(kind)) for name, kind in parse_json(first_bytes)["fields"]]
    kinds = dict(fields)
    if not {"step", "start_s"} <= set(kinds):
        raise ValueError("its header lacks required fields")
    if not set(kinds.values()) <= _KINDS:
        raise ValueError("its header has fields that are not numeric")
    return np.dtype(fields)


def checked(table: NDArray[Any]) -> NDArray[Any]:
    """Return the records; raise ValueError if they contain invalid times."""
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
        raise ValueError("a step has an invalid start time or duration")
    return table
