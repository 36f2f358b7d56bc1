"""Failures of Ray Train workers as the supervisor's types. Pure; does not import Ray."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from drivetrain.supervise.failures.failure import RankFailure, by_cause, root_cause
from drivetrain.supervise.policy import End, EndKind

_KILLED = -9
"""The exit code of a worker of which Ray only knows that it is gone."""


class ScriptFailed(Exception):
    """A rank's script failed; the message is the script's own traceback."""

    def __init__(self, text: str, exit_code: int, step: int, trains: bool, pid: int = 0) -> None:
        super().__init__(text)
        self.text, self.exit_code, self.pid = text, exit_code, pid
        self.step, self.trains = step, trains

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.text, self.exit_code, self.step, self.trains, self.pid)


def script_error(error: Exception) -> ScriptFailed | None:
    """Unwrap a worker's exception from Ray's; None if the worker is gone."""
    inner = getattr(error, "_base_exc", error)
    return inner if isinstance(inner, ScriptFailed) else None


def as_rank_failure(rank: int, error: Exception) -> RankFailure:
    """Convert one worker's failure."""
    told = script_error(error)
    if told is None:
        return RankFailure(rank, 0, _KILLED)
    return RankFailure(rank, told.pid, told.exit_code, told.text)


def end_of(failures: Sequence[RankFailure], errors: Iterable[Exception]) -> End | None:
    """Return how the attempt ended: the root cause's exit code, and the last step of the ranks.

    None if all ranks that have ended are simply gone, since their last step is not known.
    """
    told = [script for error in errors if (script := script_error(error)) is not None]
    if not told:
        return None
    cause = root_cause(failures)
    step = max(script.step for script in told)
    # a rank that only lost its peer points to another's death, which Ray has not noticed yet
    was_killed = cause.killed_by is not None or cause.is_collateral
    kind = EndKind.FAILED if step or was_killed else EndKind.START_UP
    trains = any(script.trains for script in told)
    return End(kind, step, cause.process_exit_code, trains, was_killed, cause.fault)


def in_words(failures: Sequence[RankFailure]) -> str:
    """Return the message for the user: the other ranks in one line, the cause in full and last."""
    cause, *others = by_cause(failures)
    text = f"rank {cause.rank} failed first: it {cause.how}"
    if others:
        ranks = ", ".join(str(rank) for rank in sorted(other.rank for other in others))
        text += f"\n(rank{'s' if len(others) > 1 else ''} {ranks} stopped because of it)"
    return f"{text}\n\n{cause.error.rstrip()}" if cause.error else text
