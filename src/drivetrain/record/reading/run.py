"""RunReading: every question one can put to a run's directory."""

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

# Every attempt of a run, as its ranks and its supervisor have written it down.

_RESUME_ME = 75
"""The exit code of a run that has saved and wants to go on."""


@dataclass(frozen=True)
class PastAttempt:
    """One start of a run; it may still go on."""

    number: int
    start: Mapping[str, Any]
    """start.json as it is: host, world_size, layout, device, versions …"""
    end: Mapping[str, Any]
    """end.json as it is; empty while the attempt lives, and when nobody was left to say."""
    closed: Mapping[str, Any] = field(default_factory=dict)
    """closed.json as it is: when the command that led it was over, and its exit code."""

    @property
    def command_s(self) -> float:
        """When the command that led to it began: the same for all restarts by one supervisor."""
        return float(self.start.get("command_s") or self.launched_s)

    @property
    def launched_s(self) -> float:
        """When its processes were started."""
        return float(self.start.get("launched_s") or self.start.get("started_s") or 0.0)

    @property
    def started_s(self) -> float:
        """When its ranks had met, built the model and loaded a checkpoint."""
        return float(self.start.get("started_s") or 0.0)

    @property
    def end_s(self) -> float | None:
        """When the supervisor noticed that it was over; None when it has not."""
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
        """When the command that led it was over, supervisor and all."""
        return float(self.closed["time_s"]) if "time_s" in self.closed else None

    @property
    def reason(self) -> str:
        """Why it ended, in the supervisor's words or the first failed rank's."""
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
    def resumed_step(self) -> int:
        """The step it went on from; 0 at the beginning."""
        return int(self.start.get("resumed_step") or 0)

    @property
    def last_step(self) -> int:
        """The last step that was done, as the supervisor saw it; 0 when it did not."""
        return int(self.end.get("step") or 0)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return int(self.start.get("world_size") or 0)

    @property
    def host(self) -> str:
        """Rank 0's."""
        return str(self.start.get("host") or "")


def read_attempts(source: RunSource) -> tuple[PastAttempt, ...]:
    """In order."""
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
        raise DamagedRun(f"{where}/end.json: failures are not a list of failures")
    return PastAttempt(number, start, end, closed)


def read_json(source: RunSource, name: str) -> dict[str, Any]:
    """A small document; empty when it is not there, or not whole yet."""
    try:
        document = parse_json(source.read(name, most=SMALL_BYTES))
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


_MOST_CELLS = 32 << 20
_RECORD_BYTES = 40


@dataclass(frozen=True)
class RunReading:
    """A run's directory, read-only. Every call reads anew, so that a run may go on meanwhile."""

    source: RunSource

    @property
    def address(self) -> str:
        """As it was given."""
        return self.source.address

    @property
    def name(self) -> str:
        """The directory's own."""
        return os.path.abspath(self.address).rpartition("/")[2]

    def attempts(self) -> tuple[PastAttempt, ...]:
        """Every attempt, in order."""
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
