"""Sinks: where scalars are shown or stored.

`SINKS` in `config/schema.py` lists them; docs/extending.md explains how to add one.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import socket
import uuid
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, NamedTuple, Protocol

from drivetrain.core.files import write_whole
from drivetrain.core.requirements import install_command, require
from drivetrain.record.run_directory import RunDirectory

Scalars = tuple[int, float, dict[str, float]]
"""(step, seconds since the epoch, values by name)"""


class Medium(NamedTuple):
    """A text, or an image as a byte array of rows × columns × colours."""

    step: int
    time_s: float
    name: str
    content: Any

    @property
    def is_text(self) -> bool:
        return isinstance(self.content, str)

    @property
    def file_name(self) -> str:
        """A file name that is unique for each name and step."""
        return f"{self.name}/{self.step}.{'txt' if self.is_text else 'png'}"


Outcome = Literal["finished", "failed", "preempted"]


class Sink(Protocol):
    """Receives scalars in its own thread. It may be slow and may fail; the run continues.

    Only rank 0 has one, or every node if the class has `per_node = True`. One for texts or images
    also has `write_medium(medium)` and lists what it accepts in `media`: "text", "image".
    """

    name: str
    every_s: float
    """How often it receives a batch: an expensive sink gets fewer, larger batches."""

    def write(self, batch: Sequence[Scalars]) -> None:
        """Show or store a batch, oldest first."""
        ...

    def close(self, outcome: Outcome) -> None:
        """Release files and connections; `outcome` is how the attempt ended."""
        ...


def as_json(values: Mapping[str, float]) -> dict[str, float | str]:
    """Convert NaN and infinity, which JSON lacks, to strings."""
    return {name: value if math.isfinite(value) else str(value) for name, value in values.items()}


def choose_sinks(*, is_main: bool) -> tuple[tuple[str, ...], str]:
    """Return the default sinks, and the reason for them, which is recorded by rank 0."""
    if importlib.util.find_spec("tensorboard") is not None:
        return ("tensorboard",), "tensorboard is installed"
    why = "tensorboard is not installed"
    if is_main:  # finding the command takes a tenth of a second
        why += f" ({install_command('tensorboard')})"
    return (), why


def make_sink(name: str, directory: RunDirectory) -> Sink:
    """Create the sink of that name for a run directory."""
    from drivetrain.config.schema import SINKS  # readers of runs need no config

    sink: Sink = SINKS.load(name)(directory)
    return sink


def is_per_node(name: str) -> bool:
    """Whether every node gets a sink of that name."""
    from drivetrain.config.schema import SINKS

    return bool(getattr(SINKS.load(name), "per_node", False))


# Sinks that write files into the run directory: JSON lines, and TensorBoard's.

# Scalars as one JSON object per line: `scalars.jsonl`, for scripts and notebooks.


class JsonlSink:
    """Lines such as {"step": 10, "time_s": …, "train/loss": 2.31}."""

    name = "jsonl"
    every_s = 0.5

    def __init__(self, directory: RunDirectory) -> None:
        self._file = directory.scalars.open("a", encoding="utf-8")

    def write(self, batch: Sequence[Scalars]) -> None:
        for step, time_s, values in batch:
            self._file.write(json.dumps({"step": step, "time_s": time_s, **as_json(values)}) + "\n")
        self._file.flush()

    media = ("text",)

    def write_medium(self, medium: Medium) -> None:
        line = {"step": medium.step, "time_s": medium.time_s, medium.name: medium.content}
        self._file.write(json.dumps(line) + "\n")

    def close(self, outcome: Outcome) -> None:  # noqa: ARG002
        self._file.close()


# Scalars for TensorBoard, through torch's writer.


class TensorBoardSink:
    """`tensorboard --logdir <run>/tensorboard`, or the directory above to compare runs."""

    name = "tensorboard"
    every_s = 2.0

    def __init__(self, directory: RunDirectory) -> None:
        require("tensorboard", extra="tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        attempts = directory.attempts()
        resumed_step = int(attempts[-1].start.get("resumed_step") or 0) if attempts else 0
        # drop an earlier attempt's scalars of steps that will be repeated
        purge = resumed_step + 1 if resumed_step else None
        self._writer = SummaryWriter(str(directory.tensorboard), purge_step=purge)
        self._events: Any = self._writer.file_writer

    def write(self, batch: Sequence[Scalars]) -> None:
        """Write one event per step; `add_scalar` would write one per value."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        for step, time_s, values in batch:
            points = [Summary.Value(tag=tag, simple_value=v) for tag, v in values.items()]
            self._events.add_summary(Summary(value=points), step, time_s)
        self._writer.flush()

    media = ("text", "image")

    def write_medium(self, medium: Medium) -> None:
        step, time_s, name, content = medium
        if medium.is_text:
            self._writer.add_text(name, content, step, time_s)
        else:
            self._writer.add_image(name, content, step, time_s, dataformats="HWC")

    def close(self, outcome: Outcome) -> None:  # noqa: ARG002
        """Flush and close the event file."""
        self._writer.close()


# The newest scalars at an endpoint that Prometheus scrapes, one per node.
#
# `train/loss` is `drivetrain_train_loss`, labelled with run and host. The endpoint's address
# is in `prometheus/<run>-<host>.json` beside the run directory, in the format of Prometheus'
# file_sd_configs, so that a server that reads this directory discovers every node of every run.

_GPU = re.compile(r"/gpu_(\d+)_")
_NOT_IN_A_NAME = re.compile(r"[^a-zA-Z0-9_]")


class PrometheusSink:
    """An HTTP server in a thread of prometheus_client."""

    name = "prometheus"
    per_node = True
    every_s = 1.0

    def __init__(self, directory: RunDirectory) -> None:
        client: Any = require("prometheus_client", extra="prometheus")
        settings = (directory.config().get("record") or {}).get("prometheus") or {}
        self._client = client
        self._registry = client.CollectorRegistry()
        self._labels = {"run": directory.path.name, "host": socket.gethostname()}
        self._gauges: dict[str, Any] = {}
        host = str(settings.get("host", "127.0.0.1"))
        self._server, self._thread = self._listen(host, int(settings.get("port", 9464)))
        port = self._server.server_port
        name = f"{directory.path.name}-{self._labels['host']}.json"
        self._note = directory.path.parent / "prometheus" / name
        reached_at = host if host.startswith("127.") else self._labels["host"]
        target = {"targets": [f"{reached_at}:{port}"], "labels": self._labels}
        write_whole(self._note, json.dumps([target]) + "\n")

    def write(self, batch: Sequence[Scalars]) -> None:
        """Set each gauge to its newest value."""
        for step, time_s, values in batch:
            self._set("train/step", step)
            self._set("last_report_timestamp_seconds", time_s)
            for name, value in values.items():
                self._set(name, value)

    def close(self, outcome: Outcome) -> None:  # noqa: ARG002
        """Stop the server; Prometheus sees the end of a run by the missing target."""
        self._note.unlink(missing_ok=True)
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)

    def _listen(self, host: str, port: int) -> tuple[Any, Any]:
        """Listen at this port, or at any free one if it is in use."""
        for candidate in (port, 0):
            try:
                server, thread = self._client.start_http_server(
                    candidate, host, registry=self._registry
                )
            except OSError:
                if candidate == 0:
                    raise
            else:
                return server, thread
        raise AssertionError("unreachable")

    def _set(self, name: str, value: float) -> None:
        metric, own = metric_name(name)
        labels = {**self._labels, **own}
        gauge = self._gauges.get(metric)
        if gauge is None:
            gauge = self._gauges[metric] = self._client.Gauge(
                metric, name, list(labels), registry=self._registry
            )
        gauge.labels(**labels).set(value)


def metric_name(name: str) -> tuple[str, dict[str, str]]:
    """Convert train/loss to drivetrain_train_loss; a GPU's index becomes a label."""
    gpu = _GPU.search(name)
    labels = {} if gpu is None else {"gpu": gpu[1]}
    return f"drivetrain_{_NOT_IN_A_NAME.sub('_', _GPU.sub('/gpu_', name))}", labels


# Sinks for experiment trackers: MLflow, and Weights & Biases.

# Scalars, parameters and files for MLflow: one MLflow run per run, over all its restarts.

_MOST_METRICS, _MOST_PARAMETERS = 1000, 100
"""MLflow's limits for one call."""
_LONGEST = 500


class MLflowSink:
    """Opened by the first batch, in the sink's thread, since importing MLflow takes seconds."""

    name = "mlflow"
    every_s = 10.0

    def __init__(self, directory: RunDirectory) -> None:
        if importlib.util.find_spec("mlflow") is None:
            require("mlflow", extra="mlflow")
        self._directory = directory
        self._client: Any = None
        self._run_id = ""

    def write(self, batch: Sequence[Scalars]) -> None:
        """Log finite values; MLflow has no infinity or NaN, which only the event files have."""
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

    media = ("text", "image")

    def write_medium(self, medium: Medium) -> None:
        client = self._open()
        store = client.log_text if medium.is_text else client.log_image
        store(self._run_id, medium.content, medium.file_name)

    def close(self, outcome: Outcome) -> None:
        """Upload the attempts' records, and set how the run ended."""
        client = self._open()
        attempts = self._directory.path / "attempts"
        if attempts.is_dir():
            client.log_artifacts(self._run_id, str(attempts), "attempts")
        words = {"finished": "FINISHED", "failed": "FAILED", "preempted": "KILLED"}
        if not self._settings.get("run_id"):  # a run opened elsewhere is ended there
            client.set_terminated(self._run_id, words[outcome])

    def _open(self) -> Any:
        if self._client is not None:
            return self._client
        import logging

        from mlflow import MlflowClient

        for chatty in ("mlflow", "alembic"):  # hide messages about a new store
            logging.getLogger(chatty).setLevel(logging.WARNING)
        client = MlflowClient(tracking_uri=self._address())
        self._run_id = self._settings.get("run_id") or self._run(client)
        self._client = client
        _log_parameters(client, self._run_id, self._directory.config())
        client.log_artifact(self._run_id, str(self._directory.run_yaml))
        return client

    @cached_property
    def _settings(self) -> dict[str, Any]:
        return (self._directory.config().get("record") or {}).get("mlflow") or {}

    def _address(self) -> str | None:
        """Return the tracking address; None to use what the environment or the script set."""
        given: str | None = self._settings.get("tracking_uri")
        if given or self._settings.get("run_id") or os.environ.get("MLFLOW_TRACKING_URI"):
            return given
        return f"sqlite:///{self._directory.path.parent / 'mlflow.db'}"

    def _run(self, client: Any) -> str:
        """Return the MLflow run of an earlier attempt, or create one."""
        experiment = str(self._settings.get("experiment") or "drivetrain")
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
    """Log new parameters only: MLflow refuses changes, and automatic choices may differ."""
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
    """Yield nested keys as on the command line: path.to.key."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


# Scalars and config for Weights & Biases; offline unless configured otherwise.


class WandbSink:
    """Opened by the first batch, in the sink's thread. Restarts continue the same W&B run."""

    name = "wandb"
    every_s = 5.0

    def __init__(self, directory: RunDirectory) -> None:
        if importlib.util.find_spec("wandb") is None:
            require("wandb", extra="wandb")
        self._directory = directory
        self._run: Any = None

    def write(self, batch: Sequence[Scalars]) -> None:
        """Log `step` as a value: W&B's own step must increase, but a restart goes back."""
        run = self._open()
        for step, _, values in batch:
            run.log({**values, "step": step})

    media = ("text", "image")

    def write_medium(self, medium: Medium) -> None:
        import wandb

        run = self._open()
        shown = medium.content if medium.is_text else wandb.Image(medium.content)
        run.log({medium.name: shown, "step": medium.step})

    def close(self, outcome: Outcome) -> None:
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
