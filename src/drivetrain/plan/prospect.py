"""A question to the planner about one run, and its answer. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Asking:
    """A run, and where it would run."""

    script: str
    script_args: tuple[str, ...]
    num_nodes: int
    ranks_per_node: int
    cluster: str = ""
    """A cluster file or a catalogue name; empty: predict only what needs no device."""


@dataclass(frozen=True)
class Prospect:
    """What the run is predicted to need."""

    memory_bytes: float | None = None
    """Memory of the rank that needs most; None without a cluster."""
    limit_bytes: float | None = None
    flops_per_step: float | None = None
    """The model's own operations, over all ranks."""
    unknown: str = ""
    """Why there is no prediction; empty if there is one."""

    @property
    def fits(self) -> bool:
        """Whether the run fits; True if that is not known, so that a run can try."""
        if self.memory_bytes is None or self.limit_bytes is None:
            return True
        return self.memory_bytes <= self.limit_bytes
