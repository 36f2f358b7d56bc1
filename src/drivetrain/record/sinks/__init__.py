"""Where scalars are shown.

Which there are, `SINKS` says (`config/schema.py`); to add one: docs/extending.md.
"""

from __future__ import annotations

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
    """Takes scalars in a thread of its own. It may be slow and it may fail: the run goes on.

    Rank 0 has one; a class with `per_node = True` has one on every node.
    """

    name: str
    every_s: float
    """How often it is given what has come in: a costly one less often, in larger batches."""

    def write(self, batch: Sequence[Scalars]) -> None:
        """Show or store a batch, oldest first."""
        ...

    def close(self, outcome: Outcome) -> None:
        """Let go of files and connections; told how the attempt ended."""
        ...


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
    from drivetrain.config.schema import SINKS  # readers of runs need no config

    sink: Sink = SINKS.load(name)(directory)
    return sink


def is_per_node(name: str) -> bool:
    """Whether every node has a sink of that name."""
    from drivetrain.config.schema import SINKS

    return bool(getattr(SINKS.load(name), "per_node", False))
