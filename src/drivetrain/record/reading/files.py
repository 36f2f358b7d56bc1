"""The files of a run's directory, near or far: their bytes, events, and tables of steps."""

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

# The bytes of a run's directory, from a path or from any fsspec address. Read-only.


class RunSource(Protocol):
    """Names are relative, with slashes; what is not there is empty."""

    address: str

    def names(self, folder: str) -> list[str]:
        """What lies directly in a folder, in order."""
        ...

    def read(
        self, name: str, start: int = 0, length: int | None = None, most: int = LARGE_BYTES
    ) -> bytes:
        """A file, or a part of it; past its end there is nothing. DamagedRun beyond `most`."""
        ...

    def size(self, name: str) -> int:
        """In bytes; 0 when there is no such file."""
        ...


def source_at(address: str | os.PathLike[str]) -> RunSource:
    """The run's directory at an address."""
    text = os.fspath(address)
    if "://" not in text or text.startswith("file://"):
        return LocalSource(Path(text.removeprefix("file://")))
    return RemoteSource(text)


class LocalSource:
    """A folder of this machine, or one that is mounted."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.address = str(path)

    def names(self, folder: str) -> list[str]:
        """What lies directly in a folder, in order."""
        try:
            return sorted(os.listdir(self.path / folder))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def read(
        self, name: str, start: int = 0, length: int | None = None, most: int = LARGE_BYTES
    ) -> bytes:
        """A file, or a part of it."""
        try:
            # by plain text: thousands of small files are opened one after the other
            return read_bytes(f"{self.path}/{name}", start, length, most)
        except (FileNotFoundError, NotADirectoryError):
            return b""

    def size(self, name: str) -> int:
        """In bytes."""
        try:
            return os.stat(self.path / name).st_size
        except (FileNotFoundError, NotADirectoryError):
            return 0


class RemoteSource:
    """An object store, or whatever else fsspec understands."""

    def __init__(self, address: str) -> None:
        import fsspec

        self.address = address.rstrip("/")
        self._files: Any
        self._files, self._root = fsspec.core.url_to_fs(self.address)

    def names(self, folder: str) -> list[str]:
        """What lies directly in a folder, in order."""
        self._files.invalidate_cache()
        try:
            found = self._files.ls(f"{self._root}/{folder}".rstrip("/"), detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(str(path).rstrip("/").rpartition("/")[2] for path in found)

    def read(
        self, name: str, start: int = 0, length: int | None = None, most: int = LARGE_BYTES
    ) -> bytes:
        """A file, or a part of it."""
        if start and start >= self.size(name):
            return b""  # stores answer a range past the end with an error
        if length is None and self.size(name) - start > most:
            raise DamagedRun(f"{self.address}/{name}: too large; it is not what Drivetrain wrote")
        end = None if length is None else start + length
        try:
            data: bytes = self._files.cat_file(f"{self._root}/{name}", start=start, end=end)
        except (FileNotFoundError, NotADirectoryError):
            return b""
        return data

    def size(self, name: str) -> int:
        """In bytes."""
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
    """Seconds since the epoch; a span's beginning."""
    step: int = 0
    duration_s: float = 0.0
    values: Mapping[str, Any] = field(default_factory=dict)
    """Scalars by name, or what an instant carries."""

    @property
    def end_s(self) -> float:
        """A span's end; of anything else, its time."""
        return self.time_s + self.duration_s


@dataclass(frozen=True)
class Series:
    """One scalar over a run: the newest value of each step, in the order of the steps."""

    steps: NDArray[np.int64]
    times_s: NDArray[np.float64]
    values: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.steps)


def parse_events(lines: Iterable[bytes]) -> Iterator[Event]:
    """Whole lines to events; a damaged one is passed over."""
    for line in lines:
        try:
            event = _event(parse_json(line))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
            continue
        if _is_sane(event):
            yield event


def _is_sane(event: Event) -> bool:
    """Times and steps that a run can have: what is computed from them must be a number."""
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
    """Reads what a file has grown by since the last look."""

    def __init__(self, source: RunSource, name: str) -> None:
        self._source, self._name = source, name
        self._position = 0
        self._half = b""

    def read_new(self) -> list[Event]:
        """Events since the last call; a line is waited for until it is whole."""
        data = self._source.read(self._name, self._position)
        self._position += len(data)
        *whole, self._half = (self._half + data).split(b"\n")
        return list(parse_events(whole))


def last_events(
    source: RunSource, name: str, num_events: int, window: int = 1 << 16
) -> list[Event]:
    """The last so many, without reading what came before them."""
    size = source.size(name)
    while True:
        start = max(0, size - window)
        lines = source.read(name, start).split(b"\n")
        events = list(parse_events(lines[1:] if start else lines))
        if start == 0 or len(events) >= num_events:
            return events[-num_events:]
        window *= 4


def series_of(events: Iterable[Event]) -> dict[str, Series]:
    """Every scalar's values over a run. A step that was done again counts once, the last time."""
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


# Step tables: one rank's records, and one quantity over all ranks. Pure, but for the follower.

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

    def __init__(self, source: RunSource, name: str) -> None:
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
