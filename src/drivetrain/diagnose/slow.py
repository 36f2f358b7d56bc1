"""Slow: where the steps' time goes besides computing, from a run's step records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from drivetrain.core.traits import remedy_for
from drivetrain.diagnose import straggler
from drivetrain.diagnose.finding import Finding, Kind, Severity
from drivetrain.diagnose.straggler import Array
from drivetrain.record.reading import PastAttempt, RunReading
from drivetrain.record.step_file import COMPILES, HOST_TIMED

# Bottleneck: where a step's time goes besides computing. Pure: the input is arrays.


@dataclass(frozen=True)
class Laps:
    """Seconds of each part of each step, as arrays of [ranks × steps]."""

    data_wait_s: Array
    compute_s: Array
    communication_s: Array
    optimizer_s: Array
    checkpoint_s: Array
    other_s: Array

    @property
    def lap_s(self) -> Array:
        parts = [getattr(self, name) for name in self.__dataclass_fields__]
        total: Array = np.sum(parts, axis=0)
        return total

    @property
    def own_s(self) -> Array:
        """Time before a rank waits for others."""
        return self.data_wait_s + self.compute_s


@dataclass(frozen=True)
class Shares:
    """Fractions of the steps' total time."""

    data: float
    communication: float
    """Without waiting for the slowest rank, which the network does not cause."""
    checkpoint: float
    between: float
    """Everything else but computing: hooks, logging, Python between the steps."""


def shares(laps: Laps) -> Shares:
    """Compute the shares: for data the median rank counts, for checkpoints the slowest."""
    total_s = float(np.sum(np.max(laps.lap_s, axis=0)))
    if not total_s:
        return Shares(0.0, 0.0, 0.0, 0.0)

    def share(values: Array) -> float:
        return float(np.sum(values)) / total_s

    return Shares(
        data=share(np.median(laps.data_wait_s, axis=0)),
        communication=share(np.min(laps.communication_s, axis=0)),
        checkpoint=share(np.max(laps.checkpoint_s, axis=0)),
        # the median step's: an occasional evaluation must not count
        between=float(np.median(laps.other_s) / max(np.median(laps.lap_s), 1e-9)),
    )


_LIMITS = {"data": 0.15, "communication": 0.35, "checkpoint": 0.10, "between": 0.20}
"""The share from which on it is a finding."""


def bottleneck_findings(laps: Laps) -> list[tuple[float, Finding]]:
    """Return a finding for each part that takes too much of the steps' time, with its share."""
    measured = shares(laps)
    lap_s = float(np.median(laps.lap_s))
    found = []
    for name, limit in _LIMITS.items():
        share = getattr(measured, name)
        if share >= limit:
            kind, what, remedy = _WORDS[name]
            if name == "communication":
                remedy = remedy.format(bandwidth=remedy_for("bandwidth"))
            found.append(
                (
                    share,
                    Finding(
                        Severity.WARNING,
                        kind,
                        f"{share:.0%} of the steps' time is spent {what}",
                        remedy,
                        (
                            f"median step {lap_s * 1e3:.1f} ms over {laps.lap_s.shape[1]} steps",
                            f"shares: data {measured.data:.0%}, communication "
                            f"{measured.communication:.0%}, checkpoints {measured.checkpoint:.0%}, "
                            f"between steps {measured.between:.0%}",
                        ),
                    ),
                )
            )
    return found


_WORDS = {
    "data": (
        Kind.DATA_BOUND,
        "waiting for data",
        "raise data.num_workers, cache or pre-process the samples, or read from faster storage",
    ),
    "communication": (
        Kind.COMMUNICATION_BOUND,
        "waiting for the network after every rank has arrived",
        "accumulate more micro-batches per exchange (a larger global_batch_size), set "
        "communication.compression, use {bandwidth}, or look at the slowest link",
    ),
    "checkpoint": (
        Kind.CHECKPOINT_BOUND,
        "waiting for checkpoints",
        "save less often (checkpoint.every_steps, or auto), or to faster storage",
    ),
    "between": (
        Kind.LAUNCH_BOUND,
        "between the steps, in Python",
        "log less often (record.logging_steps), make hooks lighter, or take larger micro-batches",
    ),
}


# Slow: reads a run's step records and judges them; the judging itself is pure and elsewhere.

_WARM_UP_STEPS = 3
"""At the start of an attempt caches are cold and memory is still being allocated."""
_FEWEST_STEPS = 20
_MOST_RECORDS = 4_000_000
"""Over all ranks; only the latest steps of a larger run are judged."""
_STARVED = 0.15
"""Share of its time without a CPU that a rank with a host to itself never reaches."""
_NAMES = tuple(Laps.__dataclass_fields__)


def findings(run: RunReading) -> list[Finding]:
    """Judge the last attempt that has enough steps."""
    for attempt in reversed(run.attempts()):
        steps, laps, ranks = read_laps(run, attempt)
        if len(steps) >= _FEWEST_STEPS:
            if _is_host_timed(run, ranks[0]):
                return [_TIMES_UNKNOWN]
            crowded = _oversubscribed(attempt)
            slow = [] if crowded else _stragglers(attempt, steps, laps, ranks)
            # if all wait for data, one rank waits a little longer: put what costs more first
            weighed = sorted([*slow, *bottleneck_findings(laps)], key=lambda pair: -pair[0])
            return [*crowded, *(finding for _, finding in weighed)]
    return []


def _is_host_timed(run: RunReading, rank: int) -> bool:
    return bool((run.last_steps(rank, 1)["flags"] & HOST_TIMED).any())


_TIMES_UNKNOWN = Finding(
    Severity.NOTE,
    Kind.TIMES_UNKNOWN,
    "the time breakdown of the steps is unknown: the device has no timed events, and the host's "
    "clock only shows when work was queued",
    "no action needed; this run cannot be checked for stragglers and bottlenecks",
)


def _oversubscribed(attempt: PastAttempt) -> list[Finding]:
    """Find a host on which every rank lacks CPU time: then no rank is slow by itself."""
    resources: Mapping[str, Any] = attempt.end.get("resources") or {}
    starved = {int(rank): facts.get("starved_share") for rank, facts in resources.items()}
    shares = {rank: share for rank, share in starved.items() if share is not None}
    if len(shares) < 2 or min(shares.values()) < _STARVED:
        return []
    least, most = min(shares.values()), max(shares.values())
    return [
        Finding(
            Severity.WARNING,
            Kind.OVERSUBSCRIBED,
            f"every rank on {attempt.end.get('host')} was runnable but had no CPU for "
            f"{_between(least, most)} of the time",
            "start fewer ranks or threads there (OMP_NUM_THREADS), or stop other processes on it",
            tuple(f"rank {rank}: {share:.0%}" for rank, share in list(shares.items())[:8]),
            host=str(attempt.end.get("host", "")),
            attempt=attempt.number,
        )
    ]


def _between(least: float, most: float) -> str:
    """`21% to 24%`, or `21%` if both are shown alike."""
    low, high = f"{least:.0%}", f"{most:.0%}"
    return low if low == high else f"{low} to {high}"


def _stragglers(
    attempt: PastAttempt, steps: Array, laps: Laps, ranks: Sequence[int]
) -> list[tuple[float, Finding]]:
    lags = straggler.find_lags(laps.own_s, laps.data_wait_s, laps.lap_s, steps)
    resources: Mapping[str, Any] = attempt.end.get("resources") or {}
    hosts: Mapping[str, str] = attempt.end.get("hosts") or {}
    return [
        (
            lag.cost,
            straggler.as_finding(
                lag,
                rank := ranks[lag.rank],
                str(hosts.get(str(rank), attempt.host)),
                (resources.get(str(rank)) or {}).get("starved_share"),
            ),
        )
        for lag in lags
    ]


def read_laps(run: RunReading, attempt: PastAttempt) -> tuple[Array, Laps, tuple[int, ...]]:
    """Read the steps that every rank of an attempt has recorded, with their parts."""
    ranks = tuple(rank for rank in run.ranks if rank < max(1, attempt.world_size))
    most = max(100, _MOST_RECORDS // max(1, len(ranks)))
    tables = {}
    for rank in ranks:
        table = run.last_steps(rank, most)
        table = table[(table["attempt"] == attempt.number) & (table["flags"] & COMPILES == 0)]
        tables[rank] = table[table["step"] > attempt.resumed_step + _WARM_UP_STEPS]
    steps = _common([table["step"] for table in tables.values()])
    columns: dict[str, Any] = {name: np.empty((len(ranks), len(steps))) for name in _NAMES}
    for row, table in enumerate(tables.values()):
        chosen = table[np.isin(table["step"], steps)]
        for name in _NAMES:
            columns[name][row] = chosen[name]
    return steps, Laps(**columns), ranks


def _common(all_steps: Sequence[Any]) -> Any:
    """Return the steps that all ranks have; within an attempt a rank has each step once."""
    common = all_steps[0] if all_steps else np.empty(0, np.uint32)
    for steps in all_steps[1:]:
        if len(steps) != len(common) or (steps != common).any():
            common = np.intersect1d(common, steps)
    return common
