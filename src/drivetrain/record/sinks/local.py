"""Sinks that write files into the run's directory: JSON lines, and TensorBoard's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from drivetrain.core.requirements import require
from drivetrain.record.run_directory import RunDirectory
from drivetrain.record.sinks import Outcome, Scalars, as_json

# Scalars as one JSON object per line: `scalars.jsonl`, for scripts and notebooks.


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


# Scalars for TensorBoard, by torch's own writer.


class TensorBoardSink:
    """`tensorboard --logdir <run>/tensorboard`, or the directory above to compare runs."""

    name = "tensorboard"
    every_s = 2.0

    def __init__(self, directory: RunDirectory) -> None:
        require("tensorboard", extra="tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        attempts = directory.attempts()
        resumed_step = int(attempts[-1].start.get("resumed_step") or 0) if attempts else 0
        # what an earlier attempt has shown of steps that are now done again is dropped
        purge = resumed_step + 1 if resumed_step else None
        self._writer = SummaryWriter(str(directory.tensorboard), purge_step=purge)
        self._events: Any = self._writer.file_writer

    def write(self, batch: Sequence[Scalars]) -> None:
        """One event per step, where `add_scalar` would make one per value."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        for step, time_s, values in batch:
            points = [Summary.Value(tag=tag, simple_value=v) for tag, v in values.items()]
            self._events.add_summary(Summary(value=points), step, time_s)
        self._writer.flush()

    def close(self, outcome: Outcome) -> None:  # noqa: ARG002
        """Flush and close the event file."""
        self._writer.close()
