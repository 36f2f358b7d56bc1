"""The restart policy: whether to restart after an attempt has ended. Pure.

Preemptions, failures in training and failures before the first step have separate budgets: frequent
preemptions must not use up the restarts meant for bugs.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

# Exit codes of errors that a restart would only repeat (core/errors.py): config, layout,
# environment, NaN or infinite loss; replicas that differ, as the last checkpoint may contain the
# difference; and a last step that cannot be saved, as the lost steps would be trained in vain.
_HOPELESS = frozenset({2, 3, 4, 6, 7, 8})
ONLY_FROM_THE_START = (
    "no rank had called Trainer.fit or prepare, so the script could only start over"
)
_NOT_FROM_THE_START = f"{ONLY_FROM_THE_START}; --max-restarts N allows that"
PREEMPTED_CODE = 75
STALE_CODE = 77


class EndKind(Enum):
    """Why an attempt ended."""

    FINISHED = "finished"
    FAILED = "failed"
    STALLED = "stalled"
    START_UP = "failed while starting"
    PREEMPTED = "preempted"
    PEER = "another node's failure"
    RESIZED = "nodes joined or left"
    STALE = "replaced by another attempt"


@dataclass(frozen=True)
class End:
    """How one attempt ended, as this node saw it."""

    kind: EndKind
    step: int
    """Last finished step, or that of the checkpoint it resumed from; 0 if there was none."""
    exit_code: int = 1
    trains: bool = True
    """Whether the script trains with Drivetrain, and so can resume from a checkpoint.

    Of a rank that was killed before it could report that, the script's imports decide.
    """
    by_signal: bool = False
    """Whether the first rank to fail was killed by a signal, not ended by its own error."""
    fault: str = ""
    """The error in the code and its location, or the line at which each rank hangs; empty for an
    error that may be transient."""

    @property
    def where(self) -> str:
        """How far the attempt got, for messages."""
        if not self.step:
            return "before its first step"
        is_start = self.kind is EndKind.START_UP
        return f"after resuming from step {self.step}" if is_start else f"after step {self.step}"


@dataclass(frozen=True)
class Budgets:
    """The number of restarts allowed for each kind of failure."""

    failures: int = 100
    preemptions: int = 1000
    start_ups: int = 3
    """Of these, only the ones since the last progress count."""
    same_step: int = 3
    """This many consecutive failures at one step are a crash loop."""
    restarts_anything: bool = False
    """Whether the user gave --max-restarts: then scripts that report no steps restart too."""


@dataclass(frozen=True)
class Decision:
    """Whether to restart, and why not."""

    restart: bool
    why: str = ""


def decide(end: End, history: Sequence[End], budgets: Budgets) -> Decision:
    """Return what to do after `end`; `history` holds the ends before it."""
    match end.kind:
        case EndKind.FINISHED:
            return Decision(False)
        case EndKind.STALE:
            return Decision(False, "another attempt has taken over the run")
        case EndKind.RESIZED:
            return Decision(True)
        case EndKind.PEER:
            return _after_peer(end, history, budgets)
        case EndKind.PREEMPTED:
            return _within(end, history, budgets.preemptions, "preemptions")
        case _:
            return _after_failure(end, history, budgets)


def _after_failure(end: End, history: Sequence[End], budgets: Budgets) -> Decision:
    if not budgets.restarts_anything and not _may_help(end, history):
        could_only_start_over = end.by_signal and not end.trains
        return Decision(False, _NOT_FROM_THE_START if could_only_start_over else "")
    if _is_same_mistake(end, history) and not budgets.restarts_anything:
        return Decision(False, _why_it_would_recur(end))
    if not end.trains:
        return _within(end, history, budgets.failures, "failures")
    if end.kind is EndKind.START_UP:
        recent = _since_progress(history)
        return _within(end, recent, budgets.start_ups, "failures before the first step")
    if _in_a_row(end, history) >= budgets.same_step:
        return Decision(
            False,
            f"it failed {budgets.same_step} times in a row after step {end.step}: a crash loop, "
            "which restarting would not fix",
        )
    return _within(end, history, budgets.failures, "failures")


def _why_it_would_recur(end: End) -> str:
    if end.kind is EndKind.STALLED:
        return (
            f"it hung twice {end.where} at the same place ({end.fault}), although it had "
            "longer the second time. If that line is only slow, raise --stall-timeout and "
            "--slow-timeout"
        )
    return f"the same error occurred twice {end.where} ({end.fault}); it would recur"


def _since_progress(history: Sequence[End]) -> Sequence[End]:
    """Return the ends from the first one that had reached the furthest step."""
    furthest = max((end.step for end in history), default=0)
    return [*itertools.dropwhile(lambda end: end.step < furthest, history)]


def _is_same_mistake(end: End, history: Sequence[End]) -> bool:
    """True if the previous failure was the same error or hang, in the same line, at the same step.

    A step has the same samples and random numbers each time, so a bug has the same effect.
    """
    passing = (EndKind.RESIZED, EndKind.PEER, EndKind.PREEMPTED)
    before = next((other for other in reversed(history) if other.kind not in passing), None)
    if before is None or not end.fault:
        return False
    return (before.fault, before.step) == (end.fault, end.step)


def _may_help(end: End, history: Sequence[End]) -> bool:
    """True if a restart could have a different outcome.

    False after a config error, for a script that could only start from the beginning, and after an
    error of the script itself before the first step of the first attempt.
    """
    has_trained = any(other.step for other in history)
    is_mistake = end.kind is EndKind.FAILED and not end.step and bool(end.fault)
    own_error = (
        (end.kind is EndKind.START_UP or is_mistake) and not end.by_signal and not has_trained
    )
    return end.trains and end.exit_code not in _HOPELESS and not own_error


def _after_peer(end: End, history: Sequence[End], budgets: Budgets) -> Decision:
    """Usually the node that failed decides; if every node only sees others end, none does."""
    row = itertools.takewhile(
        lambda e: e.kind is EndKind.PEER and e.step == end.step, history[::-1]
    )
    if sum(1 for _ in row) < 2 * budgets.same_step:
        return Decision(True)
    why = "ranks of other nodes repeatedly ended first; check that the nodes can reach each other"
    return Decision(False, why)


def _within(end: End, history: Sequence[End], budget: int, name: str) -> Decision:
    used = sum(1 for other in history if _pot(other) == _pot(end))
    if used < budget:
        return Decision(True)
    return Decision(False, f"restart budget exhausted: {used} {name}")


def _pot(end: End) -> str:
    """The budget an end counts against: stalls and failures share one."""
    return "failed" if end.kind in (EndKind.FAILED, EndKind.STALLED) else end.kind.value


def _in_a_row(end: End, history: Sequence[End]) -> int:
    count = 1
    for other in reversed(history):
        if other.kind in (EndKind.RESIZED, EndKind.PEER, EndKind.PREEMPTED):
            continue
        if other.step != end.step or _pot(other) != _pot(end):
            break
        count += 1
    return count
