"""A rank's event file, line by line; the last line may be half-written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from drivetrain.core.bounded import parse_json
from drivetrain.record.numbers import LAST_STEP, LATEST_S, is_within
from drivetrain.record.reading.source import Source

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


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

    def __init__(self, source: Source, name: str) -> None:
        self._source, self._name = source, name
        self._position = 0
        self._half = b""

    def read_new(self) -> list[Event]:
        """Events since the last call; a line is waited for until it is whole."""
        data = self._source.read(self._name, self._position)
        self._position += len(data)
        *whole, self._half = (self._half + data).split(b"\n")
        return list(parse_events(whole))


def last_events(source: Source, name: str, num_events: int, window: int = 1 << 16) -> list[Event]:
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
