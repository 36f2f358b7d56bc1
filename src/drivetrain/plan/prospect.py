"""What the planner is asked about one run, and what it answers. Nothing here loads torch."""

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
    """A file, or a name of the catalogue; empty: only what needs no device."""


@dataclass(frozen=True)
class Prospect:
    """What such a run takes."""

    memory_bytes: float | None = None
    """Of the rank that needs most; none without a cluster."""
    limit_bytes: float | None = None
    flops_per_step: float | None = None
    """The model's own operations, of all ranks."""
    unknown: str = ""
    """Why the planner has nothing to say, if it has not."""

    @property
    def fits(self) -> bool:
        """Where nothing is known, a run may try."""
        if self.memory_bytes is None or self.limit_bytes is None:
            return True
        return self.memory_bytes <= self.limit_bytes
