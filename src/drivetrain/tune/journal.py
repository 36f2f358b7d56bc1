"""The journal: what was asked and what came of it, one JSON line each, never changed.

    {"kind": "asked", "trial": 3, "values": {"optimization.learning_rate": 0.01}}
    {"kind": "asked", "trial": 4, "values": {…}, "fork": {"donor": 0, "step": 24, …}}
    {"kind": "ended", "trial": 3, "rung": 0, "outcome": "done", "step": 24, "value": 0.31}

A line is on disk before anything is done because of it. The driver's memory holds nothing else, so
that it may be killed between any two of them. A last line without its end was being written when
that happened: it is cut off, and what it said is found out again.
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
    """Where a trial of a population begins, if not at the beginning."""

    donor: int
    """The trial whose checkpoint it is."""
    rung: int
    step: int
    member: int
    """The place in the population that it takes."""
    checkpoint: str
    """In the study's directory, or an address of its own."""


@dataclass(frozen=True)
class Asked:
    """A trial's values."""

    trial: int
    values: Mapping[str, Scalar]
    fork: Fork | None = None
    limits: tuple[float | None, ...] = ()
    """What its value must not be worse than at each rung, to go straight on; none: anything."""
    kind: Literal["asked"] = "asked"

    @property
    def first_rung(self) -> int:
        """The one it trains to first."""
        return 0 if self.fork is None else self.fork.rung + 1


@dataclass(frozen=True)
class Promoted:
    """A trial goes on to this rung; written where that depends on the moment: eagerly."""

    trial: int
    rung: int
    kind: Literal["promoted"] = "promoted"


@dataclass(frozen=True)
class Ended:
    """A trial has come to a rung, or will not."""

    trial: int
    rung: int
    outcome: Outcome
    step: int = 0
    value: float | None = None
    """Of the metric, at that step; none unless it is done."""
    objectives: tuple[float, ...] = ()
    """Where the study has several: the value of each, the metric's first."""
    reason: str = ""
    spent: float | None = None
    """By the trial so far, in the unit of the study's budget."""
    kind: Literal["ended"] = "ended"


Entry = Asked | Promoted | Ended
_ENTRY: TypeAdapter[Entry] = TypeAdapter(Entry)


@dataclass
class Known:
    """What was found out of a state and need not be again: none of it changes by more lines.

    Else every turn of a driver would look at every trial there ever was.
    """

    num_over: int = 0
    """The trials before this one are over."""
    judged: dict[tuple[int, int], set[int]] = field(default_factory=dict)
    """Who goes on, by trial and rung, of those that were judged together."""
    ready: list[Any] | None = None
    """What can be trained; forgotten with each line."""
    of_earlier_study: list[Any] | None = None
    """What a warm start has told, as the sampler knows it."""
    as_optuna: dict[int, Any] = field(default_factory=dict)
    """Trials that are over, as the sampler knows them."""
    notes: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    """What a sampler that evolves has noted with each trial; see sampling.py."""
    points: Any = None
    """What trials are given by their number, where the sampler goes by that."""


@dataclass
class State:
    """What the journal comes to."""

    asked: list[Asked] = field(default_factory=list)
    """By trial: the first is trial 0."""
    ended: dict[tuple[int, int], Ended] = field(default_factory=dict)
    """By trial and rung."""
    promoted: set[tuple[int, int]] = field(default_factory=set)
    known: Known = field(default_factory=Known, compare=False, repr=False)
    _last: dict[int, Ended] = field(default_factory=dict)

    def take(self, entry: Entry) -> None:
        """One more line; ValueError when it cannot be the next."""
        self.known.ready = None
        if isinstance(entry, Asked):
            if entry.trial != len(self.asked):
                raise ValueError(f"trial {entry.trial} where {len(self.asked)} is next")
            if entry.fork is not None and not 0 <= entry.fork.donor < entry.trial:
                raise ValueError(f"a fork of trial {entry.fork.donor}, which is not before it")
            self.asked.append(entry)
            return
        if not 0 <= entry.trial < len(self.asked):
            raise ValueError(f"trial {entry.trial} was never asked for")
        if isinstance(entry, Promoted):
            self.promoted.add((entry.trial, entry.rung))
        else:
            for value in (entry.value, *entry.objectives):
                if value is not None and not math.isfinite(value):
                    raise ValueError(f"a value of {value}")
            self.ended[entry.trial, entry.rung] = self._last[entry.trial] = entry

    def last(self, trial: int) -> Ended | None:
        """Where a trial stands; None before its first rung."""
        return self._last.get(trial)


Look = Callable[[State, Entry], None]


class Journal:
    """The file, and the state it comes to."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self.state = read_journal(folder, mend=True)

    def write(self, entry: Entry) -> None:
        """On disk when it returns."""
        said = asdict(entry)
        few = ("fork", "limits", "objectives", "spent")  # what few trials have
        said = {k: v for k, v in said.items() if k not in few or v not in (None, ())}
        line = json.dumps(said, allow_nan=False) + "\n"
        self.state.take(entry)
        with self._path.open("ab") as file:
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())


def read_journal(folder: Path, *, mend: bool = False, before: Look | None = None) -> State:
    """The state of a study; `mend`: cut off a last line that is not whole.

    `before` sees every entry, and the state that it found.
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
            raise DamagedRun(f"{path}: line {number} is no entry of a study ({reason})") from None
    if mend and len(whole) < len(data):
        os.truncate(path, len(whole))
    return state
