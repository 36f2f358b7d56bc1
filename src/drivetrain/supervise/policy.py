"""What to do when an attempt ends. Pure: from what happened, now and before, to a decision.

Preemptions, failures in training and failures before the first step have budgets of their own: a
cluster that takes nodes away often must not use up the patience meant for bugs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

# Exit codes that mean the same thing would happen again: config, layout, environment, loss not a
# number (core/errors.py).
_HOPELESS = frozenset({2, 3, 4, 6})
PREEMPTED_CODE = 75
STALE_CODE = 77


class Kind(Enum):
    """Why an attempt ended."""

    FINISHED = "finished"
    FAILED = "failed"
    STALLED = "stalled"
    START_UP = "failed before its first step"
    PREEMPTED = "preempted"
    PEER = "another node's failure"
    RESIZED = "nodes joined or left"
    STALE = "replaced by another attempt"


@dataclass(frozen=True)
class End:
    """How one attempt ended, as this node saw it."""

    kind: Kind
    step: int
    """Last finished step; 0 when there was none."""
    exit_code: int = 1
    trains: bool = True
    """Whether the script reports its steps: then it can go on from a checkpoint."""


@dataclass(frozen=True)
class Budgets:
    """How often to start again, by what went wrong."""

    failures: int = 10
    preemptions: int = 1000
    start_ups: int = 3
    same_step: int = 3
    """So many failures in a row at one step are a crash loop."""
    restarts_anything: bool = False
    """Whether the user asked for restarts (--max-restarts) of scripts that report no steps too."""


@dataclass(frozen=True)
class Decision:
    """Start again, or stop and say why."""

    restart: bool
    why: str = ""


def decide(end: End, history: Sequence[End], budgets: Budgets) -> Decision:
    """What to do after `end`; `history` are the ends before it."""
    match end.kind:
        case Kind.FINISHED:
            return Decision(False)
        case Kind.STALE:
            return Decision(False, "another attempt has taken over the run")
        case Kind.RESIZED | Kind.PEER:
            return Decision(True)
        case Kind.PREEMPTED:
            return _within(end, history, budgets.preemptions, "preemptions")
        case _:
            return _after_failure(end, history, budgets)


def _after_failure(end: End, history: Sequence[End], budgets: Budgets) -> Decision:
    if end.exit_code in _HOPELESS:
        return Decision(False)
    if not end.trains and not budgets.restarts_anything:
        return Decision(False)  # as torchrun: it could only begin from the start
    if not end.trains:
        return _within(end, history, budgets.failures, "failures")
    if end.kind is Kind.START_UP:
        return _within(end, history, budgets.start_ups, "failures before the first step")
    if _in_a_row(end, history) >= budgets.same_step:
        return Decision(
            False,
            f"it failed {budgets.same_step} times in a row after step {end.step}: a crash loop, "
            "which more restarts would not end",
        )
    return _within(end, history, budgets.failures, "failures")


def _within(end: End, history: Sequence[End], budget: int, name: str) -> Decision:
    used = sum(1 for other in history if _pot(other) == _pot(end))
    if used < budget:
        return Decision(True)
    return Decision(False, f"{used} {name} were gone on from, which is all the budget allows")


def _pot(end: End) -> str:
    """Stalls and failures share a budget."""
    return "failed" if end.kind in (Kind.FAILED, Kind.STALLED) else end.kind.value


def _in_a_row(end: End, history: Sequence[End]) -> int:
    count = 1
    for other in reversed(history):
        if other.kind in (Kind.RESIZED, Kind.PEER, Kind.PREEMPTED):
            continue
        if other.step != end.step or _pot(other) != _pot(end):
            break
        count += 1
    return count
