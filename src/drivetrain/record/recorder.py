"""Recorder: spans, scalars and instants of one rank, one JSON object per line.

    {"kind": "span", "name": "forward_backward", "step": 7, "start_s": 1731.25, "duration_s": 0.04}
    {"kind": "scalars", "step": 10, "time_s": 1731.31, "values": {"train/loss": 2.31}}
    {"kind": "instant", "name": "run_end", "time_s": 1733.02, "fields": {"steps": 500}}

Times are seconds since the epoch, taken from one monotonic clock per process, so that spans of a
rank never overlap by a clock adjustment. The step only ever appends to an outbox.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from drivetrain.record.outbox import Outbox
from drivetrain.record.sinks import Sink, as_json

_Event = tuple[Any, ...]
Span = tuple[str, float, float]
"""(name, start, end)"""


class Recorder:
    """Writes one rank's events; rank 0's also carries scalars to the sinks."""

    def __init__(self, path: Path | None, sinks: Sequence[Sink] = ()) -> None:
        self._epoch_s = time.time() - time.perf_counter()
        self._events: Outbox[_Event] | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8")
            self._events = Outbox("event file", self._write)
        self._sinks = tuple(sinks)
        self._outboxes = [Outbox(f"sink {sink.name}", sink.write) for sink in self._sinks]

    def spans(self, step: int, *spans: Span) -> None:
        """Things that took from one time to another, both read from `time.perf_counter()`."""
        if self._events is not None:
            self._events.put(("spans", step, spans))

    @contextmanager
    def measure(self, name: str, step: int = 0) -> Iterator[None]:
        """A span around a block; for what happens rarely."""
        start_s = time.perf_counter()
        try:
            yield
        finally:
            self.spans(step, (name, start_s, time.perf_counter()))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers that belong to a step."""
        now_s = self._epoch_s + time.perf_counter()
        if self._events is not None:
            self._events.put(("scalars", step, now_s, as_json(values)))
        for outbox in self._outboxes:
            outbox.put((step, now_s, dict(values)))

    def instant(self, name: str, **fields: Any) -> None:
        """Something happened."""
        if self._events is not None:
            self._events.put(("instant", name, self._epoch_s + time.perf_counter(), fields))

    def close(self) -> None:
        """Write what is left and close the sinks."""
        for outbox, sink in zip(self._outboxes, self._sinks, strict=True):
            outbox.close()
            try:
                sink.close()
            except Exception as error:
                warnings.warn(f"sink {sink.name} could not be closed: {error!r}", stacklevel=2)
        if self._events is not None:
            self._events.close()
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _write(self, events: Sequence[_Event]) -> None:
        self._file.write("".join(self._line(event) for event in events))
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
        # By hand: three of these per step, and json.dumps takes ten times as long.
        begin_s, duration_s = self._epoch_s + start_s, end_s - start_s
        return (
            f'{{"kind": "span", "name": "{name}", "step": {step}, '
            f'"start_s": {begin_s:.6f}, "duration_s": {duration_s:.6f}}}\n'
        )
