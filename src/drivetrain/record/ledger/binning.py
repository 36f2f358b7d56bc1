"""One rank's steps in one attempt, sorted into classes and stretches of time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from drivetrain.record.ledger.values import CLASSES
from drivetrain.record.reading.events import Event
from drivetrain.record.reading.steps import Table
from drivetrain.record.step_file import COMPILES, SECONDS

_INDEX = {name: index for index, name in enumerate(CLASSES)}
_FIELD_CLASSES = {
    "data_wait_s": "data_wait",
    "communication_s": "communication",
    "checkpoint_s": "checkpoint",
}
"""A step's other seconds are productive."""
_ROUNDING_S = 1e-6
"""Of sums whose parts come in another order."""


@dataclass(frozen=True)
class Records:
    """One rank's part in one attempt."""

    table: Table
    redone: NDArray[np.bool_]

    @property
    def first_s(self) -> float:
        """The beginning of the first step."""
        return float(self.table["start_s"][0])

    @property
    def last_s(self) -> float:
        """The end of the last step."""
        return float(self.table["start_s"][-1]) + sum(float(self.table[n][-1]) for n in SECONDS)

    def between(self, begin_s: float, end_s: float) -> Records:
        """The steps that began and ended between two moments."""
        start_s = self.table["start_s"].astype(np.float64)
        took_s = np.sum([self.table[name] for name in SECONDS], axis=0, dtype=np.float64)
        is_in = (start_s >= begin_s - _ROUNDING_S) & (start_s + took_s <= end_s + _ROUNDING_S)
        return self if is_in.all() else Records(self.table[is_in], self.redone[is_in])

    def is_redone(self, step: int) -> bool:
        """Whether a later attempt did this step again."""
        return bool(self.redone[self.table["step"] == step].any())


def binned(records: Records, edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """By bin and class: a rank's steps, each in the bin it began in."""
    table, redone = records.table, records.redone
    num_bins = len(edges) - 1
    bins = np.clip(np.searchsorted(edges, table["start_s"], "right") - 1, 0, num_bins - 1)
    totals = np.zeros((num_bins, len(CLASSES)))
    compiling_s = _compiling(table)
    for name in SECONDS:
        seconds = table[name].astype(np.float64)
        if name == "compute_s":
            seconds -= compiling_s
        target = _INDEX[_FIELD_CLASSES.get(name, "productive")]
        totals[:, target] += np.bincount(bins, np.where(redone, 0.0, seconds), num_bins)
        totals[:, _INDEX["redone"]] += np.bincount(bins, np.where(redone, seconds, 0.0), num_bins)
    totals[:, _INDEX["compile"]] += np.bincount(bins, compiling_s, num_bins)
    return totals


def _compiling(table: Table) -> NDArray[np.float64]:
    """What a step took longer than the others because torch.compile worked in it."""
    compiles = (table["flags"] & COMPILES) > 0
    compute_s = table["compute_s"].astype(np.float64)
    usual_s = float(np.median(compute_s[~compiles])) if (~compiles).any() else 0.0
    return np.where(compiles, np.maximum(compute_s - usual_s, 0.0), 0.0)


def move_evaluations(
    totals: NDArray[np.float64], edges: NDArray[np.float64], spans: Sequence[Event]
) -> None:
    """A step's lap holds the evaluation that followed it: that part was not training."""
    productive, evaluation = _INDEX["productive"], _INDEX["evaluation"]
    for span in spans:
        at = int(np.clip(np.searchsorted(edges, span.time_s, "right") - 1, 0, len(totals) - 1))
        # the lap began in this bin or in one before it
        for row in range(at, -1, -1):
            seconds = min(span.duration_s, totals[row, productive])
            totals[row, productive] -= seconds
            totals[row, evaluation] += seconds
            if seconds > 0:
                break


def named(row: NDArray[np.float64]) -> dict[str, float]:
    """A row by the names of its classes."""
    return {name: float(row[index]) for name, index in _INDEX.items() if row[index]}
