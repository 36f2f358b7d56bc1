"""Adapter: what stands behind a task that was made from another library's object."""

from __future__ import annotations

from typing import Any

from drivetrain.config.schema import RunConfig
from drivetrain.train.hooks import Hook


class Adapter(Hook):
    """A hook of the task's own, which also knows the run beforehand and may have data."""

    def on_planned(self, config: RunConfig, total_steps: int | None) -> None:
        """How the run is meant to go; neither model nor optimizer is made yet."""

    def data(self) -> tuple[Any, Any]:
        """What `fit()` trains on and evaluates with when it is called without data; or None."""
        return None, None
