"""Trace: a rank's profile, summarized in a few numbers. Pure: the input is a Chrome trace.

Communication is the time from a collective's start to its end. The part during which the rank also
computes is overlapped; the rest is exposed. If the trace contains kernels (a GPU), computing is
the kernels' time, otherwise the operators' time.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_COLLECTIVE = re.compile(r"^(gloo|nccl|mpi|ucc|c10d)[:_]|^ncclDev|^nccl", re.IGNORECASE)
_STEP = re.compile(r"^step (\d+)$")
_TOP = 8
_SHORT_US = 10.0

Interval = tuple[float, float]


@dataclass(frozen=True)
class Operator:
    """All calls of one operator."""

    name: str
    num_calls: int
    self_s: float
    """Excluding the operators it called."""


@dataclass(frozen=True)
class Summary:
    """Totals over the steps in one rank's trace."""

    num_steps: int
    wall_s: float
    compute_s: float
    communication_s: float
    overlapped_s: float
    top: tuple[Operator, ...]
    num_operators: int
    short_share: float
    """Share of computing in operators shorter than 10 µs, where Python costs more than the work."""

    @property
    def exposed_s(self) -> float:
        """Communication that does not overlap with computing."""
        return self.communication_s - self.overlapped_s

    @property
    def other_s(self) -> float:
        """Neither computing nor communicating: data, Python, waiting."""
        return max(0.0, self.wall_s - self.compute_s - self.exposed_s)


def summarize(trace: Mapping[str, Any]) -> Summary:
    """Summarize all steps of a rank's trace."""
    events = [e for e in trace.get("traceEvents", []) if e.get("ph") == "X" and "dur" in e]
    steps = [_interval(e) for e in events if _STEP.match(str(e.get("name")))]
    inside = [e for e in events if _is_inside(e, steps)]
    collectives = _union(_interval(e) for e in inside if _is_collective(e))
    operators = [e for e in inside if e.get("cat") == "cpu_op" and not _is_collective(e)]
    kernels = [e for e in inside if e.get("cat") == "kernel" and not _is_collective(e)]
    computing = _union(_interval(e) for e in kernels or operators)
    own_us = _self_times(operators)
    short_us = sum(us for (_, us) in own_us if us < _SHORT_US)
    total_us = sum(us for (_, us) in own_us)
    return Summary(
        num_steps=len(steps),
        wall_s=_length(steps) * 1e-6,
        compute_s=_length(computing) * 1e-6,
        communication_s=_length(collectives) * 1e-6,
        overlapped_s=_length(_both(computing, collectives)) * 1e-6,
        top=_top(own_us),
        num_operators=len(operators),
        short_share=short_us / total_us if total_us else 0.0,
    )


def _is_collective(event: Mapping[str, Any]) -> bool:
    return bool(_COLLECTIVE.match(str(event.get("name", ""))))


def _interval(event: Mapping[str, Any]) -> Interval:
    start = float(event["ts"])
    return start, start + float(event["dur"])


def _is_inside(event: Mapping[str, Any], steps: Sequence[Interval]) -> bool:
    start = float(event["ts"])
    return any(begin <= start < end for begin, end in steps)


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _both(here: Sequence[Interval], there: Sequence[Interval]) -> list[Interval]:
    """Intersect two lists of intervals, each sorted and without overlaps."""
    found, i, j = [], 0, 0
    while i < len(here) and j < len(there):
        start, end = max(here[i][0], there[j][0]), min(here[i][1], there[j][1])
        if start < end:
            found.append((start, end))
        if here[i][1] < there[j][1]:
            i += 1
        else:
            j += 1
    return found


def _length(intervals: Sequence[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def _self_times(operators: Sequence[Mapping[str, Any]]) -> list[tuple[str, float]]:
    """Return each call's time without its nested calls, thread by thread."""
    threads: dict[Any, list[Mapping[str, Any]]] = defaultdict(list)
    for event in operators:
        threads[event.get("pid"), event.get("tid")].append(event)
    times: list[tuple[str, float]] = []
    for events in threads.values():
        events.sort(key=lambda e: (float(e["ts"]), -float(e["dur"])))
        own = [float(e["dur"]) for e in events]
        open_calls: list[int] = []
        for at, event in enumerate(events):
            while open_calls and _interval(events[open_calls[-1]])[1] <= float(event["ts"]):
                open_calls.pop()
            if open_calls:
                own[open_calls[-1]] -= float(event["dur"])
            open_calls.append(at)
        times += [(str(e["name"]), max(0.0, us)) for e, us in zip(events, own, strict=True)]
    return times


def _top(own_us: Sequence[tuple[str, float]]) -> tuple[Operator, ...]:
    seconds: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for name, us in own_us:
        seconds[name] += us  # type: ignore[assignment]
        calls[name] += 1
    best = sorted(seconds.items(), key=lambda item: -item[1])[:_TOP]
    return tuple(Operator(name, calls[name], us * 1e-6) for name, us in best)
