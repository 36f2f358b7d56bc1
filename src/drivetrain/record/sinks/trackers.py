"""Sinks for experiment trackers: MLflow, and Weights & Biases."""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from drivetrain.core.files import write_whole
from drivetrain.core.requirements import require
from drivetrain.record.run_directory import RunDirectory
from drivetrain.record.sinks import Outcome, Scalars

# Scalars, parameters and files for MLflow: one MLflow run for a run, however often it restarts.

_MOST_METRICS, _MOST_PARAMETERS = 1000, 100
"""What one call takes, by MLflow's own limits."""
_LONGEST = 500


class MLflowSink:
    """Opened by its first batch, in the sink's thread: importing MLflow alone takes seconds."""

    name = "mlflow"
    every_s = 10.0

    def __init__(self, directory: RunDirectory) -> None:
        if importlib.util.find_spec("mlflow") is None:
            require("mlflow", extra="mlflow")
        self._directory = directory
        self._client: Any = None
        self._run_id = ""

    def write(self, batch: Sequence[Scalars]) -> None:
        """Log everything; MLflow has no word for infinity, so it is left to the event files."""
        from mlflow.entities import Metric

        client = self._open()
        metrics = [
            Metric(name, value, int(time_s * 1000), step)
            for step, time_s, values in batch
            for name, value in values.items()
            if math.isfinite(value)
        ]
        for start in range(0, len(metrics), _MOST_METRICS):
            client.log_batch(self._run_id, metrics=metrics[start : start + _MOST_METRICS])

    def close(self, outcome: Outcome) -> None:
        """Leave the attempts' own accounts there, and say how it ended."""
        client = self._open()
        attempts = self._directory.path / "attempts"
        if attempts.is_dir():
            client.log_artifacts(self._run_id, str(attempts), "attempts")
        words = {"finished": "FINISHED", "failed": "FAILED", "preempted": "KILLED"}
        client.set_terminated(self._run_id, words[outcome])

    def _open(self) -> Any:
        if self._client is not None:
            return self._client
        from mlflow import MlflowClient

        for chatty in ("mlflow", "alembic"):  # a new store is not news to somebody who trains
            logging.getLogger(chatty).setLevel(logging.WARNING)
        settings: dict[str, Any] = (self._directory.config().get("record") or {}).get("mlflow", {})
        client = MlflowClient(tracking_uri=self._address(settings.get("tracking_uri")))
        self._run_id = self._run(client, str(settings.get("experiment") or "drivetrain"))
        self._client = client
        _log_parameters(client, self._run_id, self._directory.config())
        client.log_artifact(self._run_id, str(self._directory.run_yaml))
        return client

    def _address(self, given: str | None) -> str | None:
        if given or os.environ.get("MLFLOW_TRACKING_URI"):
            return given
        return f"sqlite:///{self._directory.path.parent / 'mlflow.db'}"

    def _run(self, client: Any, experiment: str) -> str:
        """The one an earlier attempt has opened, or a new one."""
        note = self._directory.path / "mlflow.json"
        if note.is_file():
            run_id = str(json.loads(note.read_text())["run_id"])
            client.update_run(run_id, status="RUNNING")
            return run_id
        found = client.get_experiment_by_name(experiment)
        artifacts = (self._directory.path.parent / "mlartifacts").as_uri()
        remote = str(client.tracking_uri).startswith("http")
        experiment_id = (
            found.experiment_id
            if found is not None
            else client.create_experiment(experiment, None if remote else artifacts)
        )
        began_s = next((a.start.get("command_s") for a in self._directory.attempts()), None)
        run = client.create_run(
            experiment_id,
            start_time=None if began_s is None else int(began_s * 1000),
            run_name=self._directory.path.name,
        )
        run_id = str(run.info.run_id)
        write_whole(note, json.dumps({"run_id": run_id, "experiment_id": experiment_id}) + "\n")
        return run_id


def _log_parameters(client: Any, run_id: str, config: Mapping[str, Any]) -> None:
    """Once: MLflow refuses to change one, and a restart may have other automatic choices."""
    from mlflow.entities import Param

    known = client.get_run(run_id).data.params
    new = [
        Param(key, str(value)[:_LONGEST])
        for key, value in flat(config)
        if key not in known and value is not None
    ]
    for start in range(0, len(new), _MOST_PARAMETERS):
        client.log_batch(run_id, params=new[start : start + _MOST_PARAMETERS])


def flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested keys as on the command line: path.to.key."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


# Scalars and config for Weights & Biases; offline unless asked otherwise.


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
