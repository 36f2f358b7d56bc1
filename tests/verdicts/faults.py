"""What is planted, and what a verdict must say of it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from drivetrain.diagnose.finding import Finding, Kind

SCRIPT = Path(__file__).with_name("planted.py")


@dataclass(frozen=True)
class Expected:
    """Of a kind of fault."""

    kinds: tuple[Kind, ...]
    names_rank: bool = True
    names_line: bool = True
    hangs: bool = False
    """Whether it is found by the stall limit."""
    is_slow: bool = False
    """Whether it only costs time; then steps must be long enough to be worth it."""


HANG, MISMATCH = Kind.HANG, Kind.MISMATCH
FAULTS = {
    "sleep_before_collective": Expected((HANG,), hangs=True),
    "skipped_collective": Expected((MISMATCH,)),
    "different_shapes": Expected((MISMATCH,)),
    "data_worker_stuck": Expected((HANG,), hangs=True),
    "deadlock": Expected((HANG,), hangs=True),
    "stopped": Expected((HANG,), names_line=False, hangs=True),
    "worker_exits_0": Expected((Kind.LEFT_EARLY,), names_line=False),
    "uneven_data_end": Expected((Kind.LEFT_EARLY,)),
    "crash": Expected((Kind.CRASH,)),
    "out_of_memory": Expected((Kind.OUT_OF_MEMORY,), names_line=False),
    "cannot_allocate": Expected((Kind.OUT_OF_MEMORY,)),
    "nan_input": Expected((Kind.NON_FINITE,), names_line=False),
    "nan_in_module": Expected((Kind.NON_FINITE,)),
    "drift": Expected((Kind.REPLICA_DRIFT,), names_line=False),
    "slow_rank_10": Expected((Kind.STRAGGLER,), names_line=False, is_slow=True),
    "slow_rank_20": Expected((Kind.STRAGGLER,), names_line=False, is_slow=True),
    "slow_rank_50": Expected((Kind.STRAGGLER,), names_line=False, is_slow=True),
    "slow_link": Expected(
        (Kind.COMMUNICATION_BOUND,), names_rank=False, names_line=False, is_slow=True
    ),
    "slow_disk": Expected((Kind.DATA_BOUND,), names_rank=False, names_line=False, is_slow=True),
}


@dataclass(frozen=True)
class Plant:
    """One planted fault."""

    name: str
    seed: int
    rank: int
    step: int
    ranks: int

    @classmethod
    def draw(cls, name: str, seed: int) -> Plant:
        """Which rank and when, and of how many, by the seed."""
        chance = random.Random(f"{name}-{seed}")  # noqa: S311 - repeatable is what it must be
        ranks = 2 if name.startswith("slow_") or name == "clean" else chance.choice((2, 3))
        ranks = 3 if name == "drift" else ranks  # of two copies nobody knows which is right
        first, last = (20, 40) if name.startswith("slow_rank") else (6, 16)
        return cls(name, seed, chance.randrange(ranks), chance.randint(first, last), ranks)

    @property
    def variable(self) -> str:
        """For the script."""
        return f"{self.name}:{self.rank}:{self.step}"


@dataclass(frozen=True)
class Score:
    """What of a verdict was right."""

    kind: bool
    rank: bool
    line: bool

    @property
    def is_right(self) -> bool:
        return self.kind and self.rank and self.line


def score(plant: Plant, findings: Sequence[Finding]) -> Score:
    """The first finding is the verdict."""
    expected = FAULTS[plant.name]
    if not findings:
        return Score(False, False, False)
    verdict = findings[0]
    return Score(
        verdict.kind in expected.kinds,
        not expected.names_rank or verdict.ranks == (plant.rank,),
        not expected.names_line or marked_line(plant.name) in f"{verdict.what} {verdict.line} ",
    )


def marked_line(name: str) -> str:
    """`planted.py:31 in`, as a verdict writes it."""
    lines = SCRIPT.read_text().splitlines()
    number = next(i for i, text in enumerate(lines, 1) if text.endswith(f"# mark: {name}"))
    return f"{SCRIPT.name}:{number} in"
