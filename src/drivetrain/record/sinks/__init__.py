"""Where scalars are shown.

To add a sink: one file here, one line in `SINKS`, one name in the schema.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from drivetrain.record.run_directory import RunDirectory

Scalars = tuple[int, float, dict[str, float]]
"""(step, seconds since the epoch, values by name)"""


Outcome = Literal["finished", "failed", "preempted"]


class Sink(Protocol):
    """Takes scalars in a thread of its own. It may be slow and it may fail: the run goes on."""

    name: str
    every_s: float
    """How often it is given what has come in: a costly one less often, in larger batches."""

    def write(self, batch: Sequence[Scalars]) -> None:
        """Show or store a batch, oldest first."""
        ...

    def close(self, outcome: Outcome) -> None:
        """Let go of files and connections; told how the attempt ended."""
        ...


# Looked up by name and imported only when asked for: a sink's library may be heavy.
SINKS = {
    "mlflow": ("drivetrain.record.sinks.mlflow", "MLflowSink"),
    "prometheus": ("drivetrain.record.sinks.prometheus", "PrometheusSink"),
    "wandb": ("drivetrain.record.sinks.wandb", "WandbSink"),
    "jsonl": ("drivetrain.record.sinks.jsonl", "JsonlSink"),
    "tensorboard": ("drivetrain.record.sinks.tensorboard", "TensorBoardSink"),
}


PER_NODE = ("prometheus",)
"""Those that every node has of its own; the others hang on rank 0."""


def as_json(values: Mapping[str, float]) -> dict[str, float | str]:
    """JSON has no word for NaN and infinity; they are written as strings, not hidden."""
    return {name: value if math.isfinite(value) else str(value) for name, value in values.items()}


def choose_sinks() -> tuple[tuple[str, ...], str]:
    """The sinks when the user left them open, and why."""
    if importlib.util.find_spec("tensorboard") is not None:
        return ("tensorboard",), "tensorboard is installed"
    return (), "tensorboard is not installed (pip install 'drivetrain[tensorboard]')"


def make_sink(name: str, directory: RunDirectory) -> Sink:
    """The sink of that name, writing into a run's directory."""
    module, attribute = SINKS[name]
    sink: Sink = getattr(importlib.import_module(module), attribute)(directory)
    return sink
