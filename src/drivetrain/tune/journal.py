"""The journal: drawn trials and their results, one JSON line each, never changed.

    {"kind": "asked", "trial": 3, "values": {"optimization.learning_rate": 0.01}}
    {"kind": "asked", "trial": 4, "values": {…}, "fork": {"donor": 0, "step": 24, …}}
    {"kind": "ended", "trial": 3, "rung": 0, "outcome": "done", "step": 24, "value": 0.31}

A line is on disk before it is acted on. The driver holds no other state, so it may be killed
between any two lines. An incomplete last line was being written when that happened: it is cut off,
and its content is determined again.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from drivetrain.core.bounded import parse_json, read_bytes
from drivetrain.core.errors import DamagedRun
from drivetrain.tune.space import Scalar

FILE = "journal.jsonl"
Outcome = Literal["done", "not_finite", "failed", "too_large"]


@dataclass(frozen=True)
class Fork:
    """The start of a trial that forks from another member of a population."""

    donor: int
    """The trial whose checkpoint it is."""
    rung: int
    step: int
    member: int
    """The place in the population that the fork takes."""
    checkpoint: str
    """Path relative to the study's directory, or an address."""


@dataclass(frozen=True)
class Asked:
    """The values drawn for a trial."""

    trial: int
    values: Mapping[str, Scalar]
    fork: Fork | None = None
    limits: tuple[float | None, ...] = ()
    """The value that it must not be worse than at each rung to continue; None: any value."""
    kind: Literal["asked"] = "asked"

    @property
    def first_rung(self) -> int:
        """The rung it trains to first."""
        return 0 if self.fork is None else self.fork.rung + 1


@dataclass(frozen=True)
class Promoted:
    """A trial continues to this rung; recorded with the eager schedule, where timing decides."""

    trial: int
    rung: int
    kind: Literal["promoted"] = "promoted"


@dataclass(frozen=True)
class Ended:
    """A trial has reached a rung, or will not."""

    trial: int
    rung: int
    outcome: Outcome
    step: int = 0
    value: float | None = None
    """The metric at that step; None unless the outcome is done."""
    objectives: tuple[float, ...] = ()
    """If the study has several objectives: the value of each, the metric's first."""
    reason: str = ""
    spent: float | None = None
    """What the trial has spent so far, in the unit of the study's budget."""
    kind: Literal["ended"] = "ended"


Entry = Asked | Promoted | Ended
_ENTRY: TypeAdapter[Entry] = TypeAdapter(Entry)


@dataclass
class Known:
    """Cached results about a state that further lines do not change.

    Without it, each iteration of a driver would look at every trial of the study.
    """

    num_over: int = 0
    """The trials before this one are over."""
    judged: dict[tuple[int, int], set[int]] = field(default_factory=dict)
    """By trial and rung: the trials that continue, of those that were judged together."""
    ready: list[Any] | None = None
    """The work that can be trained; reset by each line."""
    of_earlier_study: list[Any] | None = None
    """Trials of a warm start, as Optuna trials."""
    as_optuna: dict[int, Any] = field(default_factory=dict)
    """Trials that are over, as Optuna trials."""
    notes: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    """Attributes that an evolving sampler has stored with each trial; see sampling.py."""
    points: Any = None
    """Values by trial number, for samplers that use only the number."""


@dataclass
class State:
    """The state that the journal's lines add up to."""

    asked: list[Asked] = field(default_factory=list)
    """One per trial, from trial 0."""
    ended: dict[tuple[int, int], Ended] = field(default_factory=dict)
    """By trial and rung."""
    promoted: set[tuple[int, int]] = field(default_factory=set)
    known: Known = field(default_factory=Known, compare=False, repr=False)
    _last: dict[int, Ended] = field(default_factory=dict)

    def take(self, entry: Entry) -> None:
        """Apply one more line; ValueError if it cannot be the next."""
        self.known.ready = None
        if isinstance(entry, Asked):
            if entry.trial != len(self.asked):
                raise ValueError(f"trial {entry.trial}, but the next is {len(self.asked)}")
            if entry.fork is not None and not 0 <= entry.fork.donor < entry.trial:
                raise ValueError(f"a fork of trial {entry.fork.donor}, which does not precede it")
            self.asked.append(entry)
            return
        if not 0 <= entry.trial < len(self.asked):
            raise ValueError(f"trial {entry.trial} was never asked for")
        if isinstance(entry, Promoted):
            self.promoted.add((entry.trial, entry.rung))
        else:
            for value in (entry.value, *entry.objectives):
                if value is not None and not math.isfinite(value):
                    raise ValueError(f"a value of {value}, which is not finite")
            self.ended[entry.trial, entry.rung] = self._last[entry.trial] = entry

    def last(self, trial: int) -> Ended | None:
        """The latest result of a trial; None before its first rung."""
        return self._last.get(trial)


Look = Callable[[State, Entry], None]


class Journal:
    """The file and the state it adds up to."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self.state = read_journal(folder, repair=True)

    def write(self, entry: Entry) -> None:
        """Append a line; it is on disk when this returns."""
        said = asdict(entry)
        few = ("fork", "limits", "objectives", "spent")  # left out where a trial has none
        said = {k: v for k, v in said.items() if k not in few or v not in (None, ())}
        line = json.dumps(said, allow_nan=False) + "\n"
        self.state.take(entry)
        with self._path.open("ab") as file:
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())


def read_journal(folder: Path, *, repair: bool = False, before: Look | None = None) -> State:
    """Read the state of a study; `repair`: cut off an incomplete last line.

    `before` is called with every entry and the state before it.
    """
    path = folder / FILE
    try:
        data = read_bytes(path)
    except FileNotFoundError:
        return State()
    whole = data[: data.rfind(b"\n") + 1]
    state = State()
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            entry = _ENTRY.validate_python(parse_json(line))
            if before is not None:
                before(state, entry)
            state.take(entry)
        except (ValueError, ValidationError) as error:
            reason = " ".join(str(error).split())[:200]
            raise DamagedRun(
                f"{path}: line {number} is not an entry of a study ({reason})"
            ) from None
    if repair and len(whole) < len(data):
        os.truncate(path, len(whole))
    return state
