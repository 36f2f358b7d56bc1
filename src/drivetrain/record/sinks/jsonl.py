"""Scalars as one JSON object per line: `scalars.jsonl`, for scripts and notebooks."""

from __future__ import annotations

import json
from collections.abc import Sequence

from drivetrain.record.run_directory import RunDirectory
from drivetrain.record.sinks import Outcome, Scalars, as_json


class JsonlSink:
    """Lines such as {"step": 10, "time_s": …, "train/loss": 2.31}."""

    name = "jsonl"
    every_s = 0.5

    def __init__(self, directory: RunDirectory) -> None:
        self._file = directory.scalars.open("a", encoding="utf-8")

    def write(self, batch: Sequence[Scalars]) -> None:
        """Append and flush."""
        for step, time_s, values in batch:
            self._file.write(json.dumps({"step": step, "time_s": time_s, **as_json(values)}) + "\n")
        self._file.flush()

    def close(self, outcome: Outcome) -> None:  # noqa: ARG002
        """Close the file."""
        self._file.close()
