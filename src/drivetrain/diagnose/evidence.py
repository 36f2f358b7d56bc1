"""Evidence: what one attempt left in the run's directory, read into values.

attempts/<n>/
  start.json               hosts and layout
  end.json                 why it ended: written by the supervisor, the root cause first
  stacks/<rank>.txt        what each rank was doing when it stalled
  collectives/<rank>.json  its latest collectives, from torch's flight recorder
  non_finite/<rank>.json   where the numbers stopped being numbers
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from drivetrain.diagnose.collectives import Call, Calls, parse_calls
from drivetrain.diagnose.stacks import Stacks, parse_stacks
from drivetrain.record.reading import PastAttempt, RunReading
from drivetrain.record.run_directory import rank_of


@dataclass(frozen=True)
class Evidence:
    """All that is known of one attempt's end."""

    attempt: int
    start: Mapping[str, Any] = field(default_factory=dict)
    end: Mapping[str, Any] = field(default_factory=dict)
    stacks: Mapping[int, Stacks | None] = field(default_factory=dict)
    """None for a rank that did not answer."""
    calls: Mapping[int, Calls] = field(default_factory=dict)
    non_finite: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """Why it ended, in the supervisor's words; empty while it lives."""
        return str(self.end.get("kind", ""))

    @property
    def step(self) -> int:
        return int(self.end.get("step", 0))

    @property
    def host(self) -> str:
        return str(self.end.get("host", ""))

    @property
    def exits(self) -> dict[int, int]:
        """Exit codes of the ranks that ended by themselves, negative for a signal."""
        return {int(rank): code for rank, code in self.end.get("exits", {}).items()}

    def host_of(self, rank: int) -> str:
        """The rank's own host where it was written down."""
        hosts = self.end.get("hosts", {})
        return str(hosts.get(str(rank), self.host))

    def who(self, rank: int) -> str:
        """`rank 3 (host h2)`."""
        host = self.host_of(rank)
        return f"rank {rank} ({host})" if host else f"rank {rank}"

    def line(self, rank: int) -> str:
        """Where in the user's own code a rank was; empty when that is not known."""
        stacks = self.stacks.get(rank)
        frame = stacks.main.user_frame if stacks is not None and stacks.main is not None else None
        if frame is None and rank in self.calls:
            pending = self.calls[rank].pending
            frame = pending.user_frame if pending is not None else None
        return str(frame) if frame is not None else ""

    def line_of(self, rank: int, call: Call) -> str:
        """Where it made a call; if that is not known, where it was."""
        return str(call.user_frame) if call.user_frame is not None else self.line(rank)


def read_evidence(run: RunReading, attempt: PastAttempt) -> Evidence:
    """What there is; a file that is half-written or damaged is left out."""
    folder = f"attempts/{attempt.number:04d}"
    return Evidence(
        attempt=attempt.number,
        start=attempt.start,
        end=attempt.end,
        stacks={
            rank: parse_stacks(run.source.read(name).decode(errors="replace"))
            for rank, name in _by_rank(run, f"{folder}/stacks", ".txt").items()
        },
        calls={
            rank: calls
            for rank, name in _by_rank(run, f"{folder}/collectives", ".json").items()
            if (calls := _calls(run.document(name)))
        },
        non_finite={
            rank: document
            for rank, name in _by_rank(run, f"{folder}/non_finite", ".json").items()
            if (document := run.document(name))
        },
    )


def _calls(document: Mapping[str, Any]) -> Calls | None:
    try:
        return parse_calls(document)
    except (KeyError, TypeError, IndexError):  # of a rank that had none to tell, or damaged
        return None


def calls_of(text: str) -> Calls | None:
    """From what a rank has told as JSON."""
    try:
        return _calls(json.loads(text))
    except ValueError:
        return None


def _by_rank(run: RunReading, folder: str, suffix: str) -> dict[int, str]:
    """Each rank's file in a folder."""
    names = [name for name in sorted(run.source.names(folder)) if name.endswith(suffix)]
    stems = {name.removesuffix(suffix): name for name in names}
    ranks = {rank_of(stem): f"{folder}/{name}" for stem, name in stems.items()}
    return {rank: path for rank, path in ranks.items() if rank is not None}
