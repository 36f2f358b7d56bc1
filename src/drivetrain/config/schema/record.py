"""The section `record`, with the details of its sinks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from drivetrain.core.plugins import Plugins
from drivetrain.core.section import Section

SINKS = Plugins(
    "drivetrain.sinks",
    {
        "tensorboard": "drivetrain.record.sinks.tensorboard:TensorBoardSink",
        "jsonl": "drivetrain.record.sinks.jsonl:JsonlSink",
        "mlflow": "drivetrain.record.sinks.mlflow:MLflowSink",
        "prometheus": "drivetrain.record.sinks.prometheus:PrometheusSink",
        "wandb": "drivetrain.record.sinks.wandb:WandbSink",
    },
)
"""By name; other packages add theirs by an entry point. A sink's library may be heavy, so none is
imported before it is asked for."""
if TYPE_CHECKING:
    SinkName = str
else:
    SinkName = Literal[SINKS.names]


class MLflow(Section):
    """Where the sink mlflow writes."""

    tracking_uri: str | None = None
    """A server, or a store such as sqlite:///mlflow.db; null: MLFLOW_TRACKING_URI, or mlflow.db
    beside the run's directory."""
    experiment: str = "drivetrain"
    """The experiment's name; made when there is none."""


class Prometheus(Section):
    """How the sink prometheus is reached, on every node."""

    port: int = Field(default=9464, ge=0, le=65535)
    """Another is taken when it is not free; prometheus/ beside the run's directory says which."""
    host: str = "127.0.0.1"
    """The address to listen on: this machine's own, so that nobody else reads the metrics;
    0.0.0.0 for a Prometheus that comes from another."""


class Wandb(Section):
    """Where the sink wandb writes."""

    project: str = "drivetrain"
    """The project's name."""
    mode: Literal["offline", "online"] = "offline"
    """offline: into the run's directory, for `wandb sync`. online: to the server you are logged in
    at."""


class Record(Section):
    """What a run writes and shows."""

    logging_steps: int = Field(default=10, gt=0)
    """Metrics are reduced over ranks, written and shown each so many steps."""
    sinks: Literal["auto"] | tuple[SinkName, ...] = "auto"
    """Where scalars go besides the event files; auto: TensorBoard, if it is installed."""
    system_every_s: float | None = Field(default=10.0, gt=0)
    """CPU, memory, network and GPUs of each node go to the sinks each so many seconds, if psutil
    is installed; null: never."""
    price_per_device_hour: float | None = Field(default=None, ge=0)
    """What one rank's device costs an hour, in any currency: `drivetrain status` adds it up."""
    mlflow: MLflow = MLflow()
    """Details for the sink mlflow."""
    prometheus: Prometheus = Prometheus()
    """Details for the sink prometheus."""
    wandb: Wandb = Wandb()
    """Details for the sink wandb."""
    progress: Literal["auto", "rich", "plain", "none"] = "auto"
    """The line rank 0 shows; auto: rich on a terminal, plain lines elsewhere."""
