"""ConfigRecord: a run's run.yaml, updated with choices made during training."""

from __future__ import annotations

from typing import Any

from drivetrain.config.provenance import ResolvedConfig
from drivetrain.record.run_directory import RunDirectory


class ConfigRecord:
    """The config record of one attempt."""

    def __init__(self, resolved: ResolvedConfig, directory: RunDirectory, attempt: int) -> None:
        self._resolved = resolved
        self.directory = directory
        self.attempt = attempt

    def choose(self, path: str, value: Any, why: str) -> None:
        """Record a choice and its reason. Call on rank 0."""
        self._resolved = self._resolved.choose(path, value, why)
        self.directory.write_run_yaml(self._resolved.to_yaml(), self.attempt)
