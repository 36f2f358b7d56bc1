"""Scalars and config for Weights & Biases; offline unless asked otherwise."""

from __future__ import annotations

import importlib.util
import json
import uuid
from collections.abc import Sequence
from typing import Any

from drivetrain.core.files import write_whole
from drivetrain.core.requirements import require
from drivetrain.record.run_directory import RunDirectory
from drivetrain.record.sinks import Outcome, Scalars


class WandbSink:
    """Opened by its first batch, in the sink's thread. Restarts go on with the same W&B run."""

    name = "wandb"
    every_s = 5.0

    def __init__(self, directory: RunDirectory) -> None:
        if importlib.util.find_spec("wandb") is None:
            require("wandb", extra="wandb")
        self._directory = directory
        self._run: Any = None

    def write(self, batch: Sequence[Scalars]) -> None:
        """By the run's own steps: W&B's count would have to rise, and a restart goes back."""
        run = self._open()
        for step, _, values in batch:
            run.log({**values, "step": step})

    def close(self, outcome: Outcome) -> None:
        """Finish the run."""
        if self._run is not None:
            self._run.finish(exit_code=int(outcome != "finished"))

    def _open(self) -> Any:
        if self._run is not None:
            return self._run
        import wandb

        config = self._directory.config()
        settings: dict[str, Any] = (config.get("record") or {}).get("wandb") or {}
        note = self._directory.path / "wandb.json"
        if not note.is_file():
            write_whole(note, json.dumps({"id": uuid.uuid4().hex[:8]}) + "\n")
        self._run = wandb.init(
            project=settings.get("project", "drivetrain"),
            mode=settings.get("mode", "offline"),
            id=json.loads(note.read_text())["id"],
            name=self._directory.path.name,
            dir=str(self._directory.path),
            config=config,
            resume="allow",
            settings=wandb.Settings(x_disable_stats=True, silent=True),
        )
        self._run.define_metric("*", step_metric="step")
        return self._run
