"""Step tables: one rank's records, and one quantity over all ranks. Pure, but for the follower."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drivetrain.core.bounded import one_line
from drivetrain.core.errors import DamagedRun
from drivetrain.record.reading.source import Source
from drivetrain.record.step_file import (
    FIELDS,
    HEADER_BYTES,
    SECONDS,
    checked,
    fields_of,
    records_in,
)

Table = NDArray[Any]
"""Records as in `record/step_file.py`."""


def own_s(table: Table) -> NDArray[np.float32]:
    """What a rank took before it had to wait for others: data and compute. Judge stragglers by it.

    The time of a whole step says nothing: a collective makes all ranks as slow as the slowest.
    """
    own: NDArray[np.float32] = table["data_wait_s"] + table["compute_s"]
    return own


def duration_s(table: Table) -> NDArray[np.float32]:
    """A step from its beginning to the next one's, all of it."""
    total = np.zeros(len(table), np.float32)
    for name in SECONDS:
        total += table[name]
    return total


def is_redone(table: Table) -> NDArray[np.bool_]:
    """Which records are of steps that were done again later: work that was lost."""
    steps = table["step"]
    redone = np.zeros(len(steps), np.bool_)
    if len(steps) > 1 and not np.all(steps[1:] > steps[:-1]):
        lowest_from_here = np.minimum.accumulate(steps[::-1])[::-1]
        redone[:-1] = steps[:-1] >= lowest_from_here[1:]
    return redone


DERIVED: dict[str, Callable[[Table], NDArray[np.float32]]] = {
    "own_s": own_s,
    "duration_s": duration_s,
}


def column(table: Table, name: str) -> NDArray[Any]:
    """A field of the records, or what is computed from them."""
    if name in DERIVED:
        return DERIVED[name](table)
    values: NDArray[Any] = table[name]
    return values


@dataclass(frozen=True)
class StepMatrix:
    """One quantity of every rank in every step; NaN where a rank has no record."""

    ranks: tuple[int, ...]
    steps: NDArray[np.int64]
    """Steps done after each, in order."""
    values: NDArray[np.float32]
    """ranks × steps"""


def put_row(row: NDArray[np.float32], table: Table, name: str, first_step: int) -> None:
    """One rank's values into their places; a later record of a step writes over an earlier one."""
    place = table["step"].astype(np.int64) - first_step
    inside = (place >= 0) & (place < len(row))
    row[place[inside]] = column(table, name)[inside]


class StepFollower:
    """Reads what a step file has grown by since the last look."""

    def __init__(self, source: Source, name: str) -> None:
        self._source, self._name = source, name
        self._dtype: np.dtype[Any] | None = None
        self._position = HEADER_BYTES

    def read_new(self) -> Table:
        """Records since the last call."""
        if self._dtype is None:
            first = self._source.read(self._name, 0, HEADER_BYTES)
            if len(first) < HEADER_BYTES:
                return np.empty(0, np.dtype(list(FIELDS)))
            self._dtype = self._fields(first)
        table = records_in(self._source.read(self._name, self._position), self._dtype)
        self._position += table.nbytes
        try:
            return checked(table)
        except ValueError as error:
            raise self._damaged(error) from None

    def _fields(self, first: bytes) -> np.dtype[Any]:
        try:
            return fields_of(first)
        except (ValueError, KeyError, TypeError) as error:
            raise self._damaged(error) from None

    def _damaged(self, error: Exception) -> DamagedRun:
        where = f"{self._source.address}/{self._name}"
        return DamagedRun(f"{where}: not step records ({one_line(error)})")
