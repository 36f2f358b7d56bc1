"""What a run writes down: its directory, its events, and where its scalars are shown."""

from drivetrain.record.recorder import Recorder
from drivetrain.record.run_directory import RunDirectory

__all__ = ["Recorder", "RunDirectory"]
