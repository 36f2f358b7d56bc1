"""Adapter: hooks and data of a task that was built from another library's object."""

from __future__ import annotations

from typing import Any

from drivetrain.config.schema import RunConfig
from drivetrain.train.hooks import Hook


class Adapter(Hook):
    """A hook that belongs to a task; it is told the run's config early and may provide data."""

    def on_planned(self, config: RunConfig, total_steps: int | None) -> None:
        """Called with the resolved config, before the model and the optimizer exist."""

    def data(self) -> tuple[Any, Any]:
        """Return the training and validation data for `fit()` without data, each may be None."""
        return None, None
