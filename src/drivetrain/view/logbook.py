"""Logbook: what rank 0 wrote down, taken in piece by piece while the run goes on."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

from drivetrain.record.reading import Event
from drivetrain.view.run_view import CheckpointView, EventView
from drivetrain.view.scale import duration_text, number_text
from drivetrain.view.series import Series, make_series

_KEPT_LINES = 200
_SELDOM = ("evaluation", "evaluate", "compile")
"""Spans worth a line."""
_ENDINGS = {"run_end": "finished", "run_failed": "failed"}


class Logbook:
    """Takes in events; gives out curves, checkpoints and the last lines."""

    def __init__(self) -> None:
        self.checkpoints: list[CheckpointView] = []
        self.last_s = 0.0
        self.ending = ""
        """How the last attempt says it ended: for runs that no supervisor speaks for."""
        self._points: dict[str, tuple[list[int], list[float]]] = {}
        self._lines: deque[EventView] = deque(maxlen=_KEPT_LINES)
        self._attempt = 1
        self._drawn: dict[str, Series] = {}

    def take(self, events: Iterable[Event]) -> None:
        """The next ones, in order."""
        for event in events:
            self.last_s = max(self.last_s, event.end_s)
            if event.kind == "scalars":
                self._take_scalars(event)
            else:
                self._take_happening(event)

    @property
    def lines(self) -> tuple[EventView, ...]:
        """What happened last, the newest at the end."""
        return tuple(self._lines)

    def series(self) -> dict[str, Series]:
        """Every scalar; those that have not grown are the same objects as before."""
        for name, (steps, values) in self._points.items():
            if name not in self._drawn:
                self._drawn[name] = make_series(name, steps, values)
        return dict(self._drawn)

    def _take_scalars(self, event: Event) -> None:
        for name, value in event.values.items():
            steps, values = self._points.setdefault(name, ([], []))
            steps.append(event.step)
            values.append(float(value))
            self._drawn.pop(name, None)
            if name.startswith("val/") or not math.isfinite(value):
                self._say(event.time_s, f"step {event.step}: {name} {number_text(float(value))}")

    def _take_happening(self, event: Event) -> None:
        if event.kind == "instant":
            self.ending = _ENDINGS.get(event.name, "")
        match event.kind, event.name:
            case "instant", "attempt":
                self._attempt = int(event.values.get("number") or self._attempt)
                after = int(event.values.get("resumed_step") or 0)
                begun = f"goes on after step {after}" if after else "begins"
                self._say(event.time_s, f"attempt {self._attempt} {begun}")
            case "instant", "saved":
                blocked_s = float(event.values.get("blocked_s") or 0.0)
                beside_s = float(event.values.get("beside_s") or 0.0)
                self.checkpoints.append(
                    CheckpointView(event.step, self._attempt, event.time_s, blocked_s, beside_s)
                )
                held = duration_text(blocked_s)
                self._say(event.time_s, f"step {event.step}: saved; steps waited {held}")
            case "instant", name:
                fields = ", ".join(f"{key} {value}" for key, value in event.values.items())
                self._say(
                    event.time_s, f"{name.replace('_', ' ')}" + (f": {fields}" if fields else "")
                )
            case "span", name if name in _SELDOM:
                took = duration_text(event.duration_s)
                self._say(event.end_s, f"step {event.step}: {name} took {took}")

    def _say(self, time_s: float, what: str) -> None:
        self._lines.append(EventView(time_s, what))
