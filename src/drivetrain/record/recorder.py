"""Recorder: spans, scalars and instants of one rank, one JSON object per line.

    {"kind": "span", "name": "evaluation", "step": 7, "start_s": 1731.25, "duration_s": 0.04}
    {"kind": "scalars", "step": 10, "time_s": 1731.31, "values": {"train/loss": 2.31}}
    {"kind": "instant", "name": "run_end", "time_s": 1733.02, "fields": {"steps": 500}}

What every step records goes to a separate file, in a few bytes (`step_file.py`).

Times are seconds since the epoch, taken from one monotonic clock per process, so that a clock
adjustment never makes a rank's spans overlap. A training step only appends to an outbox.
"""

from __future__ import annotations

import json
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from drivetrain.core.errors import STOPS
from drivetrain.record.sinks import Medium, Outcome, Scalars, Sink, as_json
from drivetrain.record.step_file import SECONDS, StepTimes, StepWriter
from drivetrain.record.system import SystemWatch, is_available

# Outbox: hand over an item in a microsecond and let a thread do the slow part.
#
# `put` never waits. If the consumer falls behind by `capacity` items, new ones are counted and
# dropped; if it fails, there is one warning and it is not called again. The run continues.

Item = TypeVar("Item")
PATIENCE_S = 30.0
"""How long a run waits for a consumer when it ends: a sink may still be importing its library."""


class Outbox(Generic[Item]):
    """A bounded buffer in front of one consumer thread."""

    def __init__(
        self,
        name: str,
        consume: Callable[[Sequence[Item]], None],
        *,
        every_s: float = 0.5,
        capacity: int = 100_000,
        at_end: Callable[[], None] | None = None,
    ) -> None:
        """`at_end` is also called in the thread, after everything else has been consumed."""
        self.name = name
        self.num_dropped = 0
        self._consume = consume
        self._at_end = at_end
        self._every_s = every_s
        self._capacity = capacity
        self._items: deque[Item] = deque()
        self._closing = threading.Event()
        self._failed = False
        self.is_held = False
        """While True nothing is consumed, so that consumers can be measured separately."""
        self._thread = threading.Thread(target=self._run, name=f"drivetrain-{name}", daemon=True)
        self._thread.start()

    def put(self, item: Item) -> None:
        """Hand over an item; it is dropped if the consumer is too far behind."""
        if len(self._items) < self._capacity:
            self._items.append(item)
        else:
            self.num_dropped += 1

    def close(self) -> None:
        """Consume the remaining items, for at most `PATIENCE_S`."""
        timeout_s = PATIENCE_S
        self._closing.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            warnings.warn(
                f"{self.name}: still busy after {timeout_s:.0f} s; gave up, so what it was given "
                "last may be missing there",
                stacklevel=2,
            )
        if self.num_dropped:
            warnings.warn(
                f"{self.name}: fell behind, {self.num_dropped} items dropped", stacklevel=2
            )

    def _run(self) -> None:
        while not self._closing.wait(self._every_s):
            if not self.is_held:
                self._drain()
        self._drain()
        if self._at_end is not None:
            self._call(self._at_end)

    def _drain(self) -> None:
        items = [self._items.popleft() for _ in range(len(self._items))]
        if items and not self._failed:
            self._call(lambda: self._consume(items))

    def _call(self, function: Callable[[], None]) -> None:
        try:
            function()
        except Exception as error:
            self._failed = True
            warnings.warn(f"{self.name} failed and is switched off: {error!r}", stacklevel=2)


_Event = tuple[Any, ...]
Span = tuple[str, float, float]
"""(name, start, end)"""
_SCALARS = tuple(f"time/{name}" for name in SECONDS)
_FIRST_SECONDS = StepTimes._fields.index(SECONDS[0])


class Recorder:
    """Writes one rank's events; rank 0's also carries scalars to the sinks."""

    def __init__(self, path: Path | None, sinks: Sequence[Sink] = (), attempt: int = 1) -> None:
        self._epoch_s = time.time() - time.perf_counter()
        self._events: Outbox[_Event] | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            _end_line(path)
            self._file = path.open("a", encoding="utf-8")
            self._steps = StepWriter(path.with_suffix(".steps"), attempt, self._epoch_s)
            self._events = Outbox("event file", self._write)
        self._sinks = tuple(sinks)
        self._outcome: Outcome = "finished"
        self._outboxes = [self._outbox(sink) for sink in self._sinks]
        self._system: SystemWatch | None = None
        self._at_step = 0
        self._unreported: list[StepTimes] = []

    def _outbox(self, sink: Sink) -> Outbox[Scalars | Medium]:
        def close() -> None:  # also in the thread: a server that does not respond blocks nothing
            sink.close(self._outcome)

        def write(batch: Sequence[Scalars | Medium]) -> None:
            scalars = [each for each in batch if not isinstance(each, Medium)]
            if scalars:
                sink.write(scalars)
            for each in batch:
                if isinstance(each, Medium):
                    sink.write_medium(each)  # type: ignore[attr-defined]  # only sinks that have one

        return Outbox(f"sink {sink.name}", write, every_s=sink.every_s, at_end=close)

    def step(self, times: StepTimes) -> None:
        """Record the parts of a step; its start is a `time.perf_counter()` value."""
        if self._events is not None:
            self._events.put(("step", times))
        self._at_step = times.step
        self._unreported.append(times)

    def take_mean_times(self) -> dict[str, float]:
        """Return mean seconds per step since the last call, as scalars."""
        steps, self._unreported = self._unreported, []
        if not steps:
            return {}
        by_field = list(zip(*steps, strict=True))[_FIRST_SECONDS : _FIRST_SECONDS + len(SECONDS)]
        means = [sum(values) / len(steps) for values in by_field]
        return {"time/step_s": sum(means), **dict(zip(_SCALARS, means, strict=True))}

    def spans(self, step: int, *spans: Span) -> None:
        """Record spans; their start and end are `time.perf_counter()` values."""
        if self._events is not None:
            self._events.put(("spans", step, spans))

    @contextmanager
    def measure(self, name: str, step: int = 0) -> Iterator[None]:
        """Record a span around a block; meant for rare events."""
        start_s = time.perf_counter()
        try:
            yield
        finally:
            self.spans(step, (name, start_s, time.perf_counter()))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Record scalars of a step and pass them to the sinks."""
        now_s = self._epoch_s + time.perf_counter()
        if self._events is not None:
            self._events.put(("scalars", step, now_s, as_json(values)))
        self._show(step, now_s, values)

    def medium(self, step: int, name: str, content: Any) -> bool:
        """Record a text, or an image as rows of pixels; return whether anything stores it."""
        now_s = self._epoch_s + time.perf_counter()
        is_text = isinstance(content, str)
        if is_text and self._events is not None:
            fields = {"step": step, "name": name, "text": content}
            self._events.put(("instant", "text", now_s, fields))
        takers = [
            outbox
            for sink, outbox in zip(self._sinks, self._outboxes, strict=True)
            if ("text" if is_text else "image") in getattr(sink, "media", ())
        ]
        for outbox in takers:
            outbox.put(Medium(step, now_s, name, content))
        return is_text or bool(takers)

    def show(self, values: Mapping[str, float], step: int | None = None) -> None:
        """Pass scalars to the sinks only; without a step they belong to the current one."""
        now_s = self._epoch_s + time.perf_counter()
        self._show(self._at_step if step is None else step, now_s, values)

    def _show(self, step: int, now_s: float, values: Mapping[str, float]) -> None:
        for outbox in self._outboxes:
            outbox.put((step, now_s, dict(values)))

    def instant(self, name: str, **fields: Any) -> None:
        if self._events is not None:
            self._events.put(("instant", name, self._epoch_s + time.perf_counter(), fields))

    def hold(self, *, is_held: bool) -> None:
        """Pause or resume writing and showing; what arrives in the meantime is kept."""
        for outbox in (self._events, *self._outboxes):
            if outbox is not None:
                outbox.is_held = is_held

    def watch_system(self, every_s: float | None) -> None:
        """Start passing system metrics to the sinks, if psutil is installed."""
        if every_s is not None and self._sinks and is_available():
            self._system = SystemWatch(every_s, self.show)

    def close(self) -> None:
        """Write the remaining events and close the sinks."""
        if self._system is not None:
            self._system.close()
        for outbox in self._outboxes:
            outbox.close()
        if self._events is not None:
            self._events.close()
            self._file.close()
            self._steps.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None:
            self._outcome = "preempted" if issubclass(kind, STOPS) else "failed"
        self.close()

    def _write(self, events: Sequence[_Event]) -> None:
        steps = [event[1] for event in events if event[0] == "step"]
        if steps:
            self._steps.write(steps)
        if len(steps) < len(events):
            self._file.write("".join(self._line(e) for e in events if e[0] != "step"))
            self._file.flush()

    def _line(self, event: _Event) -> str:
        match event:
            case ("spans", step, spans):
                return "".join(self._span_line(step, *span) for span in spans)
            case ("scalars", step, time_s, values):
                document = {"kind": "scalars", "step": step, "time_s": time_s, "values": values}
            case (_, name, time_s, fields):
                document = {"kind": "instant", "name": name, "time_s": time_s, "fields": fields}
            case _:
                raise AssertionError(event)
        return json.dumps(document, default=str) + "\n"

    def _span_line(self, step: int, name: str, start_s: float, end_s: float) -> str:
        begin_s, duration_s = self._epoch_s + start_s, end_s - start_s
        return (
            f'{{"kind": "span", "name": "{name}", "step": {step}, '
            f'"start_s": {begin_s:.6f}, "duration_s": {duration_s:.6f}}}\n'
        )


def _end_line(path: Path) -> None:
    """End an unfinished line that a killed process may have left."""
    try:
        with path.open("rb+") as file:
            if file.seek(0, 2) and (file.seek(-1, 2), file.read(1))[1] != b"\n":
                file.write(b"\n")
    except FileNotFoundError:
        pass
