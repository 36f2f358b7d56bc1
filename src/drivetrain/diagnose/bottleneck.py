"""Bottleneck: what a step's time goes to when it is not computing. Pure: arrays come in."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from drivetrain.core.traits import remedy_for
from drivetrain.diagnose.finding import Finding, Kind, Severity
from drivetrain.diagnose.straggler import Array


@dataclass(frozen=True)
class Laps:
    """Seconds of each step on each rank, [ranks × steps]."""

    data_wait_s: Array
    compute_s: Array
    communication_s: Array
    optimizer_s: Array
    checkpoint_s: Array
    other_s: Array

    @property
    def lap_s(self) -> Array:
        """The whole step."""
        parts = [getattr(self, name) for name in self.__dataclass_fields__]
        total: Array = np.sum(parts, axis=0)
        return total

    @property
    def own_s(self) -> Array:
        """Before the ranks meet."""
        return self.data_wait_s + self.compute_s


@dataclass(frozen=True)
class Shares:
    """Of all the steps' time."""

    data: float
    communication: float
    """Beyond waiting for the slowest rank, which is not the network's doing."""
    checkpoint: float
    between: float
    """Neither of these nor computing: hooks, logging, Python between the steps."""


def shares(laps: Laps) -> Shares:
    """What a step waits for: for data and checkpoints, the rank that waits longest counts."""
    total_s = float(np.sum(np.max(laps.lap_s, axis=0)))
    if not total_s:
        return Shares(0.0, 0.0, 0.0, 0.0)

    def share(values: Array) -> float:
        return float(np.sum(values)) / total_s

    return Shares(
        data=share(np.median(laps.data_wait_s, axis=0)),
        communication=share(np.min(laps.communication_s, axis=0)),
        checkpoint=share(np.max(laps.checkpoint_s, axis=0)),
        # the usual step's: an evaluation now and then is not what is meant
        between=float(np.median(laps.other_s) / max(np.median(laps.lap_s), 1e-9)),
    )


_LIMITS = {"data": 0.15, "communication": 0.35, "checkpoint": 0.10, "between": 0.20}
"""From which share on it is a finding."""


def findings(laps: Laps) -> list[tuple[float, Finding]]:
    """What the run's steps spend too much of their time on, each with its share of it."""
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
        "waiting for the network, with every rank there",
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
