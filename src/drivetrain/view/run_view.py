"""RunView: everything that is shown of a run, as values for both the page and the terminal."""

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
    """The time of the last write while it is alive."""
    kind: str
    """finished, failed, stalled, preempted … or running."""
    first_step: int
    last_step: int
    num_ranks: int
    host: str
    what: str
    """One sentence on how it ended."""
    lost_starts: Sequence[str] = ()
    """How each start ended that came before it and opened no attempt."""

    @property
    def steps(self) -> str:
        """Its steps: '51–100', or 'none'."""
        made_any = self.first_step <= self.last_step
        return f"{self.first_step:,}–{self.last_step:,}" if made_any else "none"


@dataclass(frozen=True)
class CheckpointView:
    """One saved checkpoint."""

    step: int
    attempt: int
    time_s: float
    blocked_s: float
    """How long steps waited for it."""
    beside_s: float
    """How long it was written in the background."""
    written_bytes: float | None = None
    """Bytes written by all ranks; None if the run did not record it."""
    referred_bytes: float = 0.0
    """Bytes that are stored in earlier checkpoints instead."""


@dataclass(frozen=True)
class LedgerView:
    """Where every second went, in total and over time."""

    seconds: Mapping[str, float]
    """Seconds by class, in the ledger's order; they add up to the wall clock."""
    edges_s: Floats
    """Bins from the first command to the last heartbeat, from 0."""
    over_time: Mapping[str, Floats]
    """Seconds of each class in each bin."""
    between_runs_s: float = 0.0
    """Seconds after a finished attempt until it was started again, which no class has."""

    @property
    def wall_s(self) -> float:
        return sum(self.seconds.values())

    def share(self, name: str) -> float:
        """Return a class's share of the wall clock."""
        return self.seconds.get(name, 0.0) / self.wall_s if self.wall_s else 0.0


@dataclass(frozen=True)
class RankGrid:
    """Seconds per step, ranks down and steps across; many ranks or steps share a cell."""

    rank_edges: Sequence[int]
    """Row r shows the slowest of ranks rank_edges[r] to rank_edges[r + 1] - 1."""
    step_edges: Sequence[int]
    """Column c shows the mean of the steps from step_edges[c] on."""
    seconds: Mapping[str, Table]
    """By part of a step: rows × columns, NaN where there is no step."""

    @property
    def num_ranks(self) -> int:
        """The largest number of ranks the run had."""
        return self.rank_edges[-1] - self.rank_edges[0]

    def name_of_row(self, row: int) -> str:
        """Return the row's rank or ranks: '3' or '64–127'."""
        first, last = self.rank_edges[row], self.rank_edges[row + 1] - 1
        return str(first) if first == last else f"{first:,}–{last:,}"


@dataclass(frozen=True)
class RankMeans:
    """The mean parts of each rank's last steps, in seconds per step."""

    ranks: Sequence[int]
    num_ranks: int
    """The run's number of ranks; `ranks` may be only a sample."""
    seconds: Mapping[str, Floats]
    """By part of a step, one value per rank; NaN for a rank without steps."""
    step_s: Floats
    """The whole step, including what is not among the parts."""

    @property
    def own_s(self) -> Floats:
        """Seconds before a rank waits for others: shows slow ranks, unlike the whole step."""
        return self.seconds["compute"] + self.seconds["data_wait"]


@dataclass(frozen=True)
class EventView:
    """An event in one line."""

    time_s: float
    what: str


@dataclass(frozen=True)
class RunView:
    """A run as it is shown to a person."""

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
    """Every rank over all steps, for the page."""
    recent: RankMeans | None = None
    """Every rank in its last steps, for the terminal."""
    events: Sequence[EventView] = ()
    expert_load: LoadRecord | None = None
    """The latest tokens per expert; None without experts."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """The environment: host, versions, layout …"""
    config: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Key → (value, source)."""
    findings: Sequence[Finding] | None = None
    """The most severe first; None if the run was not diagnosed."""
    plan: Sequence[tuple[str, float, float, str]] = ()
    """Predictions and measurements: (name, predicted, measured, unit)."""

    @property
    def span_s(self) -> float:
        """From the first attempt's start to the last one's end."""
        return self.end_s - self.start_s

    @property
    def wall_s(self) -> float:
        """The span, except pauses after which a finished run was started again."""
        return self.span_s - (self.ledger.between_runs_s if self.ledger is not None else 0.0)

    def scalar(self, name: str) -> ChartSeries:
        """Return a scalar; an empty series if the run has none of that name."""
        nothing = np.zeros(0)
        return self.scalars.get(name, ChartSeries(name, nothing, nothing))
