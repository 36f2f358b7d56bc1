"""The files of a local or remote run directory: bytes, events, and step tables."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from drivetrain.core.bounded import LARGE_BYTES, one_line, parse_json, read_bytes
from drivetrain.core.errors import DamagedRun
from drivetrain.record.run_directory import LAST_STEP, LATEST_S, is_within
from drivetrain.record.step_file import (
    FIELDS,
    HEADER_BYTES,
    SECONDS,
    checked,
    fields_of,
    records_in,
)

# The bytes of a run directory, from a path or any fsspec address. Read-only.


class RunSource(Protocol):
    """Read-only file access. Names are relative, with slashes; a missing file reads as empty."""

    address: str

    def names(self, folder: str) -> list[str]:
        """Return the names in a directory, sorted."""
        ...

    def read(
        self, name: str, start: int = 0, length: int | None = None, most: int = LARGE_BYTES
    ) -> bytes:
        """Return a file or a part of it, empty past its end; DamagedRun if larger than `most`."""
        ...

    def size(self, name: str) -> int:
        """Return the size in bytes; 0 if there is no such file."""
        ...


def source_at(address: str | os.PathLike[str]) -> RunSource:
    """Return the run directory at an address."""
    text = os.fspath(address)
    if "://" not in text or text.startswith("file://"):
        return LocalSource(Path(text.removeprefix("file://")))
    return RemoteSource(text)


class LocalSource:
    """A local or mounted directory."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.address = str(path)

    def names(self, folder: str) -> list[str]:
        try:
            return sorted(os.listdir(self.path / folder))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def read(
        self, name: str, start: int = 0, length: int | None = None, most: int = LARGE_BYTES
    ) -> bytes:
        try:
            # a plain string is faster than a Path: thousands of small files are opened
            return read_bytes(f"{self.path}/{name}", start, length, most)
        except (FileNotFoundError, NotADirectoryError):
            return b""

    def size(self, name: str) -> int:
        try:
            return os.stat(self.path / name).st_size
        except (FileNotFoundError, NotADirectoryError):
            return 0


class RemoteSource:
    """An object store, or anything else that fsspec supports."""

    def __init__(self, address: str) -> None:
        import fsspec

        self.address = address.rstrip("/")
        self._files: Any
        self._files, self._root = fsspec.core.url_to_fs(self.address)

    def names(self, folder: str) -> list[str]:
        self._files.invalidate_cache()
        try:
            found = self._files.ls(f"{self._root}/{folder}".rstrip("/"), detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(str(path).rstrip("/").rpartition("/")[2] for path in found)

    def read(
        self, name: str, start: int = 0, length: int | None = None, most: int = LARGE_BYTES
    ) -> bytes:
        if start and start >= self.size(name):
            return b""  # stores return an error for a range past the end
        if length is None and self.size(name) - start > most:
            raise DamagedRun(
                f"{self.address}/{name}: too large; Drivetrain did not write this file"
            )
        end = None if length is None else start + length
        try:
            data: bytes = self._files.cat_file(f"{self._root}/{name}", start=start, end=end)
        except (FileNotFoundError, NotADirectoryError):
            return b""
        return data

    def size(self, name: str) -> int:
        self._files.invalidate_cache()
        try:
            return int(self._files.size(f"{self._root}/{name}") or 0)
        except (FileNotFoundError, NotADirectoryError):
            return 0


# A rank's event file, line by line; the last line may be half-written.


@dataclass(frozen=True)
class Event:
    """A span, some scalars, or an instant."""

    kind: str
    name: str
    time_s: float
    """Seconds since the epoch; the start of a span."""
    step: int = 0
    duration_s: float = 0.0
    values: Mapping[str, Any] = field(default_factory=dict)
    """Scalars by name, or the fields of an instant."""

    @property
    def end_s(self) -> float:
        """The end of a span; the time of anything else."""
        return self.time_s + self.duration_s


@dataclass(frozen=True)
class Series:
    """One scalar over a run: the newest value of each step, in step order."""

    steps: NDArray[np.int64]
    times_s: NDArray[np.float64]
    values: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.steps)


def parse_events(lines: Iterable[bytes]) -> Iterator[Event]:
    """Parse complete lines into events; damaged ones are skipped."""
    for line in lines:
        try:
            event = _event(parse_json(line))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
            continue
        if _is_sane(event):
            yield event


def _is_sane(event: Event) -> bool:
    """Whether times and steps are plausible, so that what is computed from them is finite."""
    return (
        is_within(event.time_s, LATEST_S)
        and is_within(event.duration_s, LATEST_S)
        and is_within(event.step, LAST_STEP)
    )


def _event(line: dict[str, Any]) -> Event:
    match line["kind"]:
        case "span":
            step, duration_s = int(line["step"]), float(line["duration_s"])
            return Event("span", str(line["name"]), float(line["start_s"]), step, duration_s)
        case "scalars":
            values = {name: float(value) for name, value in line["values"].items()}
            return Event("scalars", "", float(line["time_s"]), int(line["step"]), values=values)
        case kind:
            fields = dict(line.get("fields") or {})
            step = int(fields.get("step") or 0)
            return Event(str(kind), str(line["name"]), float(line["time_s"]), step, values=fields)


class EventFollower:
    """Reads the events that a file has gained since the last call."""

    def __init__(self, source: RunSource, name: str) -> None:
        self._source, self._name = source, name
        self._position = 0
        self._half = b""

    def read_new(self) -> list[Event]:
        """Return the events since the last call; an incomplete line is kept for the next one."""
        data = self._source.read(self._name, self._position)
        self._position += len(data)
        *whole, self._half = (self._half + data).split(b"\n")
        return list(parse_events(whole))


def last_events(
    source: RunSource, name: str, num_events: int, window: int = 1 << 16
) -> list[Event]:
    """Return a file's last events, without reading the earlier ones."""
    size = source.size(name)
    while True:
        start = max(0, size - window)
        lines = source.read(name, start).split(b"\n")
        events = list(parse_events(lines[1:] if start else lines))
        if start == 0 or len(events) >= num_events:
            return events[-num_events:]
        window *= 4


def series_of(events: Iterable[Event]) -> dict[str, Series]:
    """Return every scalar's values over a run; of a repeated step, only the last one."""
    import numpy as np

    points: dict[str, dict[int, tuple[float, float]]] = {}
    for event in events:
        if event.kind == "scalars":
            for name, value in event.values.items():
                points.setdefault(name, {})[event.step] = (event.time_s, value)
    found = {}
    for name, by_step in points.items():
        steps = sorted(by_step)
        times_s, values = zip(*(by_step[step] for step in steps), strict=True)
        found[name] = Series(
            np.array(steps, np.int64), np.array(times_s, np.float64), np.array(values, np.float64)
        )
    return found


# Step tables: one rank's records, and one quantity over all ranks. Pure, except for the follower.

Table = NDArray[Any]
"""Records as in `record/step_file.py`."""


def own_s(table: Table) -> NDArray[np.float32]:
    """Return the seconds before a rank waits for others (data and compute); judge stragglers by it.

    The time of a whole step shows nothing: a collective makes all ranks as slow as the slowest.
    """
    own: NDArray[np.float32] = table["data_wait_s"] + table["compute_s"]
    return own


def duration_s(table: Table) -> NDArray[np.float32]:
    """Return the seconds from a step's start to the next one's."""
    total = np.zeros(len(table), np.float32)
    for name in SECONDS:
        total += table[name]
    return total


def is_redone(table: Table) -> NDArray[np.bool_]:
    """Return which records are of steps that were repeated later, and so were lost work."""
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
    """Return a field of the records, or a quantity derived from them."""
    if name in DERIVED:
        return DERIVED[name](table)
    values: NDArray[Any] = table[name]
    return values


@dataclass(frozen=True)
class StepMatrix:
    """One quantity for every rank and step; NaN where a rank has no record."""

    ranks: tuple[int, ...]
    steps: NDArray[np.int64]
    """The step numbers, in order."""
    values: NDArray[np.float32]
    """ranks × steps"""


def put_row(row: NDArray[np.float32], table: Table, name: str, first_step: int) -> None:
    """Write one rank's values into its row; a later record of a step overwrites an earlier one."""
    place = table["step"].astype(np.int64) - first_step
    inside = (place >= 0) & (place < len(row))
    row[place[inside]] = column(table, name)[inside]


class StepFollower:
    """Reads the records that a step file has gained since the last call."""

    def __init__(self, source: RunSource, name: str) -> None:
        self._source, self._name = source, name
        self._dtype: np.dtype[Any] | None = None
        self._position = HEADER_BYTES

    def read_new(self) -> Table:
        """Return the records since the last call."""
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
