"""Evidence: the files that one attempt left in the run directory, parsed.

attempts/<n>/
  start.json               hosts and layout
  end.json                 why it ended, root cause first; written by the supervisor
  tracebacks/<rank>.txt    the same errors, for people
  stacks/<rank>.txt        what each rank was doing when it stalled
  collectives/<rank>.json  its latest collectives, from torch's flight recorder
  non_finite/<rank>.json   where a value first became NaN or infinite
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
    """Everything known about how one attempt ended."""

    attempt: int
    start: Mapping[str, Any] = field(default_factory=dict)
    end: Mapping[str, Any] = field(default_factory=dict)
    stacks: Mapping[int, Stacks | None] = field(default_factory=dict)
    """None for a rank that did not answer."""
    calls: Mapping[int, Calls] = field(default_factory=dict)
    non_finite: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    tracebacks: Mapping[int, str] = field(default_factory=dict)
    """The file of each rank's traceback, relative to the run's directory."""

    @property
    def kind(self) -> str:
        """The supervisor's code for why it ended; empty while it is alive."""
        return str(self.end.get("kind", ""))

    def traceback_file(self, rank: int) -> str:
        """The file with the rank's whole traceback; earlier releases wrote only end.json."""
        return self.tracebacks.get(rank, f"{_folder(self.attempt)}/end.json")

    @property
    def step(self) -> int:
        return int(self.end.get("step", 0))

    @property
    def host(self) -> str:
        return str(self.end.get("host", ""))

    @property
    def exits(self) -> dict[int, int]:
        """Exit codes of the ranks that exited by themselves; negative for a signal."""
        return {int(rank): code for rank, code in self.end.get("exits", {}).items()}

    def host_of(self, rank: int) -> str:
        """The rank's host where recorded, otherwise the attempt's."""
        hosts = self.end.get("hosts", {})
        return str(hosts.get(str(rank), self.host))

    def who(self, rank: int) -> str:
        """`rank 3 (host h2)`."""
        host = self.host_of(rank)
        return f"rank {rank} ({host})" if host else f"rank {rank}"

    def line(self, rank: int) -> str:
        """The line of the user's code that a rank was at; empty if unknown."""
        stacks = self.stacks.get(rank)
        frame = stacks.main.user_frame if stacks is not None and stacks.main is not None else None
        if frame is None and rank in self.calls:
            pending = self.calls[rank].pending
            frame = pending.user_frame if pending is not None else None
        return str(frame) if frame is not None else ""

    def line_of(self, rank: int, call: Call) -> str:
        """The line a call was made from, or else the line the rank was at."""
        return str(call.user_frame) if call.user_frame is not None else self.line(rank)


def _folder(attempt: int) -> str:
    return f"attempts/{attempt:04d}"


def read_evidence(run: RunReading, attempt: PastAttempt) -> Evidence:
    """Read an attempt's files; a half-written or damaged one is skipped."""
    folder = _folder(attempt.number)
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
        tracebacks=_by_rank(run, f"{folder}/tracebacks", ".txt"),
    )


def _calls(document: Mapping[str, Any]) -> Calls | None:
    try:
        return parse_calls(document)
    except (KeyError, TypeError, IndexError):  # the rank had no calls, or the file is damaged
        return None


def calls_of(text: str) -> Calls | None:
    """Parse a rank's calls from JSON; None if they are damaged."""
    try:
        return _calls(json.loads(text))
    except ValueError:
        return None


def _by_rank(run: RunReading, folder: str, suffix: str) -> dict[int, str]:
    names = [name for name in sorted(run.source.names(folder)) if name.endswith(suffix)]
    stems = {name.removesuffix(suffix): name for name in names}
    ranks = {rank_of(stem): f"{folder}/{name}" for stem, name in stems.items()}
    return {rank: path for rank, path in ranks.items() if rank is not None}
