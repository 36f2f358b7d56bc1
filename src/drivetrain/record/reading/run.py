"""RunReading: every question one can put to a run's directory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import yaml

from drivetrain.core.bounded import SMALL_BYTES, one_line, parse_yaml
from drivetrain.core.errors import ConfigError, DamagedRun, Problem
from drivetrain.record.numbers import rank_of
from drivetrain.record.reading.attempts import PastAttempt, read_attempts, read_json
from drivetrain.record.reading.events import (
    Event,
    EventFollower,
    Series,
    last_events,
    series_of,
)
from drivetrain.record.reading.source import Source, source_at
from drivetrain.record.reading.steps import StepFollower, StepMatrix, Table, put_row
from drivetrain.record.step_file import FIELDS, HEADER_BYTES, checked, fields_of, parse_steps

_MOST_CELLS = 32 << 20
_RECORD_BYTES = 40


@dataclass(frozen=True)
class RunReading:
    """A run's directory, read-only. Every call reads anew, so that a run may go on meanwhile."""

    source: Source

    @property
    def address(self) -> str:
        """As it was given."""
        return self.source.address

    @property
    def name(self) -> str:
        """The directory's own."""
        return os.path.abspath(self.address).rpartition("/")[2]

    def attempts(self) -> tuple[PastAttempt, ...]:
        """Every life of the run, in order."""
        return read_attempts(self.source)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The resolved config, as in run.yaml; empty when there is none."""
        return self._section("config")

    @cached_property
    def sources(self) -> dict[str, Any]:
        """Where each value of the config came from."""
        return self._section("sources")

    @cached_property
    def _run_yaml(self) -> dict[str, Any]:
        try:
            document = parse_yaml(self.source.read("run.yaml", most=SMALL_BYTES) or b"{}")
        except (ValueError, yaml.YAMLError) as error:
            raise DamagedRun(f"{self.address}/run.yaml: not YAML ({one_line(error)})") from None
        return document if isinstance(document, dict) else {}

    def _section(self, name: str) -> dict[str, Any]:
        found = self._run_yaml.get(name) or {}
        if not isinstance(found, dict):
            raise DamagedRun(f"{self.address}/run.yaml: {name} is not a section with keys")
        return found

    def document(self, name: str) -> dict[str, Any]:
        """A JSON file of the run, plan.json for one; empty when there is none."""
        return read_json(self.source, name)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Those that have written anything, in order."""
        stems = {name.partition(".")[0] for name in self.source.names("events")}
        return tuple(sorted(rank for stem in stems if (rank := rank_of(stem)) is not None))

    # ── steps ────────────────────────────────────────────────────────────────────────────────

    def steps(self, rank: int) -> Table:
        """A rank's records, as `step_file` has them, in the order in which they were written."""
        name = _steps(rank)
        with self._steps_of(name):
            return checked(parse_steps(self.source.read(name)))

    @contextmanager
    def _steps_of(self, name: str) -> Iterator[None]:
        try:
            yield
        except (ValueError, KeyError, TypeError) as error:
            reason = one_line(error)
            raise DamagedRun(f"{self.address}/{name}: not step records ({reason})") from None

    def last_steps(self, rank: int, num_records: int) -> Table:
        """The last so many, without reading what came before them."""
        name = _steps(rank)
        first = self.source.read(name, 0, HEADER_BYTES)
        if len(first) < HEADER_BYTES:
            return np.empty(0, np.dtype(list(FIELDS)))
        with self._steps_of(name):
            dtype = fields_of(first)
        num_written = (self.source.size(name) - HEADER_BYTES) // dtype.itemsize
        skipped = max(0, num_written - num_records)
        data = self.source.read(name, HEADER_BYTES + skipped * dtype.itemsize)
        with self._steps_of(name):
            return checked(np.frombuffer(data, dtype, len(data) // dtype.itemsize))

    def tables(self, ranks: Sequence[int] | None = None) -> Iterator[tuple[int, Table]]:
        """Rank by rank, one in memory at a time."""
        for rank in self.ranks if ranks is None else ranks:
            yield rank, self.steps(rank)

    def matrices(
        self, names: Sequence[str], ranks: Sequence[int] | None = None
    ) -> dict[str, StepMatrix]:
        """Several quantities over ranks × steps, in one pass over the files.

        Names are fields of the records, `own_s` or `duration_s`. One takes 4 bytes per rank and
        step. A step that was done again counts once, the last time.
        """
        chosen = tuple(self.ranks if ranks is None else ranks)
        last_step = self.last_step()
        self._check_room(len(names) * len(chosen) * last_step, chosen)
        values = {name: np.full((len(chosen), last_step), np.nan, np.float32) for name in names}
        for row, (_, table) in enumerate(self.tables(chosen)):
            for name in values:
                put_row(values[name][row], table, name, 1)
        steps = np.arange(1, last_step + 1)
        return {name: StepMatrix(chosen, steps, each) for name, each in values.items()}

    def matrix(self, name: str, ranks: Sequence[int] | None = None) -> StepMatrix:
        """One quantity over ranks × steps."""
        return self.matrices([name], ranks)[name]

    def _check_room(self, num_cells: int, ranks: Sequence[int]) -> None:
        """A step of a high number needs room for all before it; a few records do not have it."""
        num_records = sum(self.source.size(_steps(rank)) for rank in ranks) // _RECORD_BYTES
        if num_cells > max(_MOST_CELLS, 256 * num_records):
            raise DamagedRun(
                f"{self.address}/events: steps up to {self.last_step():,} in {num_records:,}"
                " records; they are not what Drivetrain wrote"
            )

    def last_step(self) -> int:
        """The highest step that the first rank has a record of."""
        steps = [self.steps(rank)["step"] for rank in self.ranks[:1]]
        return max((int(each.max()) for each in steps if len(each)), default=0)

    # ── events ───────────────────────────────────────────────────────────────────────────────

    def events(self, rank: int) -> list[Event]:
        """All of a rank's spans, scalars and instants, in order."""
        return EventFollower(self.source, _events(rank)).read_new()

    def tail(self, rank: int, num_events: int = 20) -> list[Event]:
        """A rank's last events."""
        return last_events(self.source, _events(rank), num_events)

    def scalars(self, rank: int = 0) -> dict[str, Series]:
        """Every scalar by its name; they hang on rank 0."""
        return series_of(self.events(rank))

    # ── following a run that goes on ─────────────────────────────────────────────────────────

    def follow_events(self, rank: int) -> EventFollower:
        """Reads new events only, call by call."""
        return EventFollower(self.source, _events(rank))

    def follow_steps(self, rank: int) -> StepFollower:
        """Reads new records only, call by call."""
        return StepFollower(self.source, _steps(rank))


def open_run(address: str | os.PathLike[str]) -> RunReading:
    """The run in a directory, or at an fsspec address; an error that says so when there is none."""
    source = source_at(address)
    names = set(source.names(""))
    if names & {"run.yaml", "attempts", "events"}:
        return RunReading(source)
    rule = "holds no run" if names else "no such directory"
    remedy = "give a run's directory; `drivetrain runs` lists those under a folder"
    raise ConfigError([Problem("RUN", rule, remedy, os.fspath(address))])


def _steps(rank: int) -> str:
    return f"events/{rank:05d}.steps"


def _events(rank: int) -> str:
    return f"events/{rank:05d}.jsonl"
