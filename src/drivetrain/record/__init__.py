"""What a run records: its directory, its events, and the sinks that show its scalars."""

from drivetrain.record.recorder import Recorder
from drivetrain.record.run_directory import RunDirectory

__all__ = ["Recorder", "RunDirectory"]
