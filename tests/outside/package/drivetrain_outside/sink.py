"""csv: a sink of another package. One line per value: step, name, value."""

from __future__ import annotations

from collections.abc import Sequence

from drivetrain.record import RunDirectory
from drivetrain.record.sinks import Outcome, Scalars


class CsvSink:
    name = "csv"
    every_s = 0.5

    def __init__(self, directory: RunDirectory) -> None:
        self._file = (directory.path / "scalars.csv").open("a", encoding="utf-8")

    def write(self, batch: Sequence[Scalars]) -> None:
        for step, _, values in batch:
            for name, value in values.items():
                self._file.write(f"{step},{name},{value}\n")
        self._file.flush()

    def close(self, outcome: Outcome) -> None:
        self._file.write(f"ended,{outcome},\n")
        self._file.close()
