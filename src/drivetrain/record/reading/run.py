"""RunReading: read-only access to everything in a run directory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import yaml

from drivetrain.core.bounded import SMALL_BYTES, one_line, parse_json, parse_yaml
from drivetrain.core.errors import ConfigError, DamagedRun, Problem, exception_line
from drivetrain.record.reading.files import (
    Event,
    EventFollower,
    RunSource,
    Series,
    StepFollower,
    StepMatrix,
    Table,
    last_events,
    put_row,
    series_of,
    source_at,
)
from drivetrain.record.run_directory import attempt_of, check_numbers, rank_of
from drivetrain.record.step_file import FIELDS, HEADER_BYTES, checked, fields_of, parse_steps

# Every attempt of a run, as its ranks and its supervisor have recorded it.

_RESUME_ME = 75
"""The exit code of a run that has saved and should be resumed."""


@dataclass(frozen=True)
class PastAttempt:
    """One attempt of a run; it may still be running."""

    number: int
    start: Mapping[str, Any]
    """The content of start.json: host, world_size, layout, device, versions …"""
    end: Mapping[str, Any]
    """The content of end.json; empty while it is alive, or if no process was left to write it."""
    closed: Mapping[str, Any] = field(default_factory=dict)
    """The content of closed.json: when the command that ran it ended, and its exit code."""

    @property
    def command_s(self) -> float:
        """When its command began: the same for all restarts by one supervisor."""
        return float(self.start.get("command_s") or self.launched_s)

    @property
    def launched_s(self) -> float:
        """When its processes were started."""
        return float(self.start.get("launched_s") or self.start.get("started_s") or 0.0)

    @property
    def started_s(self) -> float:
        """When its ranks had joined, built the model and loaded a checkpoint."""
        return float(self.start.get("started_s") or 0.0)

    @property
    def end_s(self) -> float | None:
        """When the supervisor noticed that it had ended; None if it has not."""
        return float(self.end["time_s"]) if "time_s" in self.end else None

    @property
    def kind(self) -> str | None:
        """finished, failed, stalled, preempted, resized, peer, start_up …; None without an end."""
        if "kind" in self.end:
            return str(self.end["kind"])
        if "exit_code" in self.closed:
            code = self.closed["exit_code"]
            return "finished" if code == 0 else "preempted" if code == _RESUME_ME else "failed"
        return None

    @property
    def closed_s(self) -> float | None:
        """When its command, including the supervisor, ended."""
        return float(self.closed["time_s"]) if "time_s" in self.closed else None

    @property
    def reason(self) -> str:
        """Why it ended, as the supervisor or the first failed rank reported."""
        detail = str(self.end.get("detail") or "")
        failures = self.end.get("failures") or []
        if detail or not failures:
            return detail
        cause = failures[0]
        said = exception_line(str(cause.get("error") or ""))
        given = cause.get("exit_code")
        code = given if isinstance(given, int) else 0
        how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        return f"rank {cause.get('rank')}: {said or how}"

    @property
    def lost_starts(self) -> tuple[str, ...]:
        """How each start ended that came before it and opened no attempt."""
        lost = self.start.get("lost_starts")
        return tuple(map(str, lost)) if isinstance(lost, list) else ()

    @property
    def resumed_step(self) -> int:
        """The step it resumed from; 0 if it started from scratch."""
        return int(self.start.get("resumed_step") or 0)

    @property
    def last_step(self) -> int:
        """The last completed step that the supervisor saw; 0 if none."""
        return int(self.end.get("step") or 0)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return int(self.start.get("world_size") or 0)

    @property
    def host(self) -> str:
        """Rank 0's host."""
        return str(self.start.get("host") or "")


def read_attempts(source: RunSource) -> tuple[PastAttempt, ...]:
    """Read all attempts, in order."""
    found = [(attempt_of(name), name) for name in source.names("attempts")]
    return tuple(
        _attempt(source, number, f"attempts/{name}") for number, name in found if number is not None
    )


def _attempt(source: RunSource, number: int, folder: str) -> PastAttempt:
    start, end, closed = (
        read_json(source, f"{folder}/{name}.json") for name in ("start", "end", "closed")
    )
    where = f"{source.address}/{folder}"
    counts = ("world_size", "resumed_step", "total_steps")
    check_numbers(f"{where}/start.json", start, ("command_s", "launched_s", "started_s"), counts)
    check_numbers(f"{where}/end.json", end, ("time_s",), ("step",))
    check_numbers(f"{where}/closed.json", closed, ("time_s",), ())
    failures = end.get("failures") or []
    if not isinstance(failures, list) or not all(isinstance(each, dict) for each in failures):
        raise DamagedRun(f"{where}/end.json: failures is not a list of objects")
    return PastAttempt(number, start, end, closed)


def read_json(source: RunSource, name: str) -> dict[str, Any]:
    """Read a small JSON file; empty if it is missing or incomplete."""
    try:
        document = parse_json(source.read(name, most=SMALL_BYTES))
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


_MOST_CELLS = 32 << 20
_RECORD_BYTES = 40


@dataclass(frozen=True)
class RunReading:
    """A run directory, read-only. Methods read again with every call, so the run may be live."""

    source: RunSource

    @property
    def address(self) -> str:
        """The address as given."""
        return self.source.address

    @property
    def name(self) -> str:
        """The directory's name."""
        return os.path.abspath(self.address).rpartition("/")[2]

    def attempts(self) -> tuple[PastAttempt, ...]:
        """Return every attempt, in order."""
        return read_attempts(self.source)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The resolved config from run.yaml; empty if there is none."""
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
            raise DamagedRun(f"{self.address}/run.yaml: {name} is not a mapping")
        return found

    def document(self, name: str) -> dict[str, Any]:
        """Return a JSON file of the run, such as plan.json; empty if there is none."""
        return read_json(self.source, name)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that have written anything, in order."""
        stems = {name.partition(".")[0] for name in self.source.names("events")}
        return tuple(sorted(rank for stem in stems if (rank := rank_of(stem)) is not None))

    # ── steps ────────────────────────────────────────────────────────────────────────────────

    def steps(self, rank: int) -> Table:
        """Return a rank's records (see `step_file`), in the order in which they were written."""
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
        """Return a rank's last records, without reading the earlier ones."""
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
        """Yield each rank with its records; only one table is in memory at a time."""
        for rank in self.ranks if ranks is None else ranks:
            yield rank, self.steps(rank)

    def matrices(
        self, names: Sequence[str], ranks: Sequence[int] | None = None
    ) -> dict[str, StepMatrix]:
        """Return several quantities over ranks × steps, in one pass over the files.

        Names are fields of the records, `own_s` or `duration_s`. Each takes 4 bytes per rank and
        step. Of a step that was repeated, only the last record counts.
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
        """Return one quantity over ranks × steps."""
        return self.matrices([name], ranks)[name]

    def _check_room(self, num_cells: int, ranks: Sequence[int]) -> None:
        """Refuse a matrix far larger than the records: a step needs room for all before it."""
        num_records = sum(self.source.size(_steps(rank)) for rank in ranks) // _RECORD_BYTES
        if num_cells > max(_MOST_CELLS, 256 * num_records):
            raise DamagedRun(
                f"{self.address}/events: steps up to {self.last_step():,} in {num_records:,}"
                " records; Drivetrain did not write them"
            )

    def last_step(self) -> int:
        """Return the highest step that the first rank has recorded."""
        steps = [self.steps(rank)["step"] for rank in self.ranks[:1]]
        return max((int(each.max()) for each in steps if len(each)), default=0)

    # ── events ───────────────────────────────────────────────────────────────────────────────

    def events(self, rank: int) -> list[Event]:
        """Return all of a rank's spans, scalars and instants, in order."""
        return EventFollower(self.source, _events(rank)).read_new()

    def tail(self, rank: int, num_events: int = 20) -> list[Event]:
        """Return a rank's last events."""
        return last_events(self.source, _events(rank), num_events)

    def scalars(self, rank: int = 0) -> dict[str, Series]:
        """Return every scalar by name; rank 0 records them."""
        return series_of(self.events(rank))

    # ── following a live run ────────────────────────────────────────────────────────────────────

    def follow_events(self, rank: int) -> EventFollower:
        """Return a reader that reads only new events with each call."""
        return EventFollower(self.source, _events(rank))

    def follow_steps(self, rank: int) -> StepFollower:
        """Return a reader that reads only new records with each call."""
        return StepFollower(self.source, _steps(rank))


def open_run(address: str | os.PathLike[str]) -> RunReading:
    """Open the run in a directory or at an fsspec address; raise ConfigError if there is none."""
    source = source_at(address)
    names = set(source.names(""))
    if names & {"run.yaml", "attempts", "events"}:
        return RunReading(source)
    rule = "not a run directory" if names else "no such directory"
    remedy = "give a run's directory; `drivetrain runs` lists the runs under a directory"
    raise ConfigError([Problem("RUN", rule, remedy, os.fspath(address))])


def _steps(rank: int) -> str:
    return f"events/{rank:05d}.steps"


def _events(rank: int) -> str:
    return f"events/{rank:05d}.jsonl"
