"""The run directory: the only thing that client, supervisor and worker share.

<run>/
  run.yaml                  the resolved config, with the source of every value
  attempts/<n>/             facts about each attempt, with its run.yaml
  changes.jsonl             changes between attempts: refused, accepted or only reported
  events/<rank>.jsonl       spans, scalars and instants, append-only, one writer per file
  events/<rank>.steps       where each step's seconds went, 40 bytes a step
  checkpoints/step-<k>-a<n>/  a checkpoint that attempt n saved after step k; see checkpoint/
  tensorboard/              scalars for TensorBoard
  mlflow.json, wandb.json   the tracker's run id, so that a restart continues the same run
"""

from __future__ import annotations

import json
import math
import os
import re
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drivetrain.core.bounded import parse_json, read_text, read_yaml
from drivetrain.core.errors import DamagedRun, EnvironmentProblem, Problem
from drivetrain.core.files import write_whole

# Which names in a run directory are rank or attempt numbers, and which values are plausible.

_RANK = re.compile(r"[0-9]{1,8}")
_LAST_ATTEMPT = 2**16 - 2
"""A step record has two bytes for the attempt's number."""
LATEST_S = 1e11
"""Upper limit for times, in seconds since the epoch."""
LAST_STEP = 2**53


def rank_of(name: str) -> int | None:
    """Return the rank a file is named after; None for other names."""
    return int(name) if _RANK.fullmatch(name) else None


def attempt_of(name: str) -> int | None:
    """Return the attempt a directory is named after; None for other names."""
    number = rank_of(name)
    return number if number is not None and number < _LAST_ATTEMPT else None


def check_numbers(
    where: str, facts: Mapping[str, Any], moments: Iterable[str], counts: Iterable[str]
) -> None:
    """Raise DamagedRun if a time or a count is present but invalid."""
    for name in moments:
        if facts.get(name) is not None and not is_within(facts[name], LATEST_S):
            raise DamagedRun(f"{where}: {name} is {_shown(facts[name])}, not a time")
    for name in counts:
        value = facts.get(name)
        if value is not None and not (is_within(value, LAST_STEP) and value == int(value)):
            raise DamagedRun(f"{where}: {name} is {_shown(value)}, not a count")


def is_within(value: Any, most: float) -> bool:
    """Whether a value is a number from 0 to `most`."""
    return type(value) in (int, float) and math.isfinite(value) and 0 <= value <= most


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 40 else f"{text[:37]}..."


@dataclass(frozen=True)
class RunDirectory:
    """The paths inside a run; nothing is created implicitly."""

    path: Path

    @classmethod
    def create(cls, output_dir: Path, name: str | None) -> RunDirectory:
        """Create a new directory; a number is appended if the name is taken."""
        wanted = name or time.strftime("%Y-%m-%d_%H-%M-%S")
        for attempt in range(1, 10_000):
            path = output_dir / (wanted if attempt == 1 else f"{wanted}-{attempt}")
            try:
                path.mkdir(parents=True)
            except FileExistsError:
                continue
            except OSError as error:
                raise cannot_write("output_dir", path, error) from error
            return cls(path.absolute())
        raise FileExistsError(f"{output_dir / wanted}: this name is taken ten thousand times")

    @classmethod
    def at(cls, path: Path) -> RunDirectory:
        """Use a directory that was determined before: create it, or resume in it."""
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise cannot_write("--run-dir", path, error) from error
        if not os.access(path, os.W_OK):
            raise cannot_write("--run-dir", path)
        return cls(path.absolute())

    @property
    def run_yaml(self) -> Path:
        return self.path / "run.yaml"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def scalars(self) -> Path:
        """The file of the JSONL sink."""
        return self.path / "scalars.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def events(self, rank: int) -> Path:
        """Return a rank's event file; only that rank appends to it."""
        return self.path / "events" / f"{rank:05d}.jsonl"

    def attempt(self, number: int) -> Path:
        """Return the directory of one attempt."""
        return self.path / "attempts" / f"{number:04d}"

    def next_attempt(self) -> int:
        """Return the number for the next attempt."""
        return max((attempt.number for attempt in self.attempts()), default=0) + 1

    def begin_attempt(self, number: int, facts: Mapping[str, Any]) -> None:
        """Record how a new attempt starts."""
        _write_json(self.attempt(number) / "start.json", facts)

    def end_attempt(self, number: int, facts: Mapping[str, Any]) -> None:
        """Record how it ended; done by the supervisor, if there is one: the worker may be dead."""
        _write_json(self.attempt(number) / "end.json", facts)

    def close_attempt(self, number: int, facts: Mapping[str, Any]) -> None:
        """Record that the command that ran it has ended, too."""
        _write_json(self.attempt(number) / "closed.json", facts)

    def attempts(self) -> list[AttemptRecord]:
        """Return all attempts so far, in order."""
        found = []
        for path in sorted((self.path / "attempts").glob("[0-9]*")):
            number = attempt_of(path.name)
            if number is not None:
                found.append(
                    AttemptRecord(number, *(_read_json(path / f"{n}.json") for n in _ENDS))
                )
        return found

    def failures(self) -> tuple[float, float]:
        """Return the number of failures and the seconds of work, which `auto` is based on."""
        attempts = self.attempts()
        failed = [a for a in attempts[:-1] if a.end.get("kind") not in ("preempted", "finished")]
        now = {"host": socket.gethostname(), "started_s": time.time()}
        following = [*(attempt.start for attempt in attempts[1:]), now]
        seconds = map(_lasted_s, attempts, following)
        return float(len(failed)), sum(seconds)

    def config(self) -> dict[str, Any]:
        """Return the config in run.yaml; empty before it is written."""
        try:
            document = read_yaml(self.run_yaml) or {}
        except OSError:
            return {}
        config = document.get("config") if isinstance(document, dict) else None
        return config if isinstance(config, dict) else {}

    def write_run_yaml(self, text: str, attempt: int | None = None) -> None:
        """Write it atomically. The attempt's own copy stays if a later one has another config."""
        write_whole(self.run_yaml, text, sync=True)
        if attempt is not None:
            write_whole(self.attempt(attempt) / "run.yaml", text)

    def note_changes(self, checkpoint: str, changes: Iterable[Mapping[str, Any]]) -> None:
        """Record what differs from when a checkpoint was saved, and how it was handled."""
        lines = [
            json.dumps({"time_s": time.time(), "checkpoint": checkpoint, **change}, default=str)
            for change in changes
        ]
        with (self.path / "changes.jsonl").open("a", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)


@dataclass(frozen=True)
class AttemptRecord:
    """One attempt, as recorded."""

    number: int
    start: Mapping[str, Any]
    end: Mapping[str, Any]
    """Empty while it is alive, or if no process was left to write it."""


def config_so_far(path: Path | None) -> dict[str, Any]:
    """Return the config of earlier attempts; empty if there are none."""
    if path is None or not (path / "run.yaml").is_file():
        return {}
    return RunDirectory(path).config()


def micro_batch_so_far(path: Path | None) -> int | None:
    """Return the micro-batch size of earlier attempts: a different size changes the numbers."""
    size = config_so_far(path).get("micro_batch_size")
    return size if isinstance(size, int) else None


_ENDS = ("start", "end")


def _lasted_s(attempt: AttemptRecord, following: Mapping[str, Any]) -> float:
    """Return the seconds to the next attempt or its end, whichever has the same host's clock."""
    began_s, host = attempt.start.get("started_s"), attempt.start.get("host")
    ends = {following.get("host"): following.get("started_s")}
    ends |= {attempt.end.get("host"): attempt.end.get("time_s")} if host not in ends else {}
    ended_s = ends.get(host)
    return max(0.0, float(ended_s) - float(began_s)) if ended_s and began_s else 0.0


def cannot_write(where: str, path: Path, error: OSError | None = None) -> EnvironmentProblem:
    """Build an error for a user's mistake, which must not be retried."""
    reason = "not writable" if error is None else error.strerror or str(error)
    remedy = "give a folder you may write to"
    return EnvironmentProblem([Problem(where, reason, remedy, str(path))])


def _write_json(path: Path, facts: Mapping[str, Any]) -> None:
    write_whole(path, json.dumps(dict(facts), indent=2, default=str) + "\n", sync=True)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        facts = parse_json(read_text(path))
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}
