"""Every life of a run, as its ranks and its supervisor have written it down."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from drivetrain.core.bounded import SMALL_BYTES, parse_json
from drivetrain.core.errors import DamagedRun, exception_line
from drivetrain.record.numbers import attempt_of, check_numbers
from drivetrain.record.reading.source import Source

_RESUME_ME = 75
"""The exit code of a run that has saved and wants to go on."""


@dataclass(frozen=True)
class PastAttempt:
    """One life of a run; it may still go on."""

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


def read_attempts(source: Source) -> tuple[PastAttempt, ...]:
    """In order."""
    found = [(attempt_of(name), name) for name in source.names("attempts")]
    return tuple(
        _attempt(source, number, f"attempts/{name}") for number, name in found if number is not None
    )


def _attempt(source: Source, number: int, folder: str) -> PastAttempt:
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


def read_json(source: Source, name: str) -> dict[str, Any]:
    """A small document; empty when it is not there, or not whole yet."""
    try:
        document = parse_json(source.read(name, most=SMALL_BYTES))
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}
