"""RunView: all that is shown of a run, as values. The page and the terminal draw the same ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from drivetrain.diagnose.finding import Finding
from drivetrain.record.expert_load import LoadRecord
from drivetrain.view.series import ChartSeries, Floats

Table = NDArray[np.float32]


@dataclass(frozen=True)
class AttemptView:
    """One attempt of the run."""

    number: int
    start_s: float
    end_s: float
    """Now, while it lives."""
    kind: str
    """finished, failed, stalled, preempted … or running."""
    first_step: int
    last_step: int
    num_ranks: int
    host: str
    what: str
    """One sentence on how it ended."""


@dataclass(frozen=True)
class CheckpointView:
    """One save."""

    step: int
    attempt: int
    time_s: float
    blocked_s: float
    """How long steps waited for it."""
    beside_s: float
    """How long it was written beside the steps."""
    written_bytes: float | None = None
    """By all ranks; None: the run did not record it."""
    referred_bytes: float = 0.0
    """Of it that earlier checkpoints have."""


@dataclass(frozen=True)
class LedgerView:
    """Where every second went, in all and over time."""

    seconds: Mapping[str, float]
    """By class, in the ledger's order; they add up to the wall clock."""
    edges_s: Floats
    """Bins of the wall clock, from 0."""
    over_time: Mapping[str, Floats]
    """Seconds of each class in each bin."""

    @property
    def wall_s(self) -> float:
        return sum(self.seconds.values())

    def share(self, name: str) -> float:
        """Of the wall clock."""
        return self.seconds.get(name, 0.0) / self.wall_s if self.wall_s else 0.0


@dataclass(frozen=True)
class RankGrid:
    """Seconds per step, ranks down and steps across; many ranks or steps share a cell."""

    rank_edges: Sequence[int]
    """Row r is ranks rank_edges[r] to rank_edges[r + 1] - 1; the slowest of them is shown."""
    step_edges: Sequence[int]
    """Column c is the steps from step_edges[c] on; their mean is shown."""
    seconds: Mapping[str, Table]
    """By part of a step: rows × columns, NaN where there was no step."""

    @property
    def num_ranks(self) -> int:
        """Of the run at its widest."""
        return self.rank_edges[-1] - self.rank_edges[0]

    def name_of_row(self, row: int) -> str:
        """'3', or '64–127'."""
        first, last = self.rank_edges[row], self.rank_edges[row + 1] - 1
        return str(first) if first == last else f"{first:,}–{last:,}"


@dataclass(frozen=True)
class RankMeans:
    """What each rank's last steps were made of, in seconds per step."""

    ranks: Sequence[int]
    num_ranks: int
    """Of the run; some of them, when these are only a sample."""
    seconds: Mapping[str, Floats]
    """By part of a step, one value per rank; NaN for a rank without steps."""
    step_s: Floats
    """All of a step, with what is not among the parts."""

    @property
    def own_s(self) -> Floats:
        """Before a rank had to wait for others: who is slow shows here, not in the whole step."""
        return self.seconds["compute"] + self.seconds["data_wait"]


@dataclass(frozen=True)
class EventView:
    """Something that happened, in one line."""

    time_s: float
    what: str


@dataclass(frozen=True)
class RunView:
    """A run as a person looks at it."""

    name: str
    state: str
    """running, quiet, restarting, finished, failed, stalled, preempted …"""
    start_s: float
    end_s: float
    step: int
    total_steps: int | None
    scalars: Mapping[str, ChartSeries]
    attempts: Sequence[AttemptView]
    checkpoints: Sequence[CheckpointView]
    ledger: LedgerView | None
    ranks: RankGrid | None = None
    """Every rank over all steps; for the page."""
    recent: RankMeans | None = None
    """Every rank in its last steps; for the terminal."""
    events: Sequence[EventView] = ()
    expert_load: LoadRecord | None = None
    """What experts were sent last; None without any."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """What ran, on what: host, versions, layout …"""
    config: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Key → (value, where it came from)."""
    findings: Sequence[Finding] | None = None
    """The worst first; None when nobody looked."""
    plan: Sequence[tuple[str, float, float, str]] = ()
    """What was predicted beside what was measured: (name, predicted, measured, unit)."""

    @property
    def wall_s(self) -> float:
        """From the first attempt's start to the last one's end."""
        return self.end_s - self.start_s

    def scalar(self, name: str) -> ChartSeries:
        """Empty when the run has none of that name."""
        nothing = np.zeros(0)
        return self.scalars.get(name, ChartSeries(name, nothing, nothing))
