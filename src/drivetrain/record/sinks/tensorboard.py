"""Scalars for TensorBoard, by torch's own writer."""

from __future__ import annotations

from collections.abc import Sequence

from drivetrain.core.extras import require
from drivetrain.record.run_directory import RunDirectory
from drivetrain.record.sinks import Scalars


class TensorBoardSink:
    """`tensorboard --logdir <run>/tensorboard`, or the directory above to compare runs."""

    name = "tensorboard"

    def __init__(self, directory: RunDirectory) -> None:
        require("tensorboard", extra="tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(directory.tensorboard))

    def write(self, batch: Sequence[Scalars]) -> None:
        """One point per scalar, with the time it was recorded."""
        for step, time_s, values in batch:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step, walltime=time_s)
        self._writer.flush()

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()
